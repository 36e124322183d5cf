"""The site, which Sphinx makes of the pages in docs/ and of those beside code: ``make docs``.

The pages are Markdown that reads well on a code host, too. What only the site needs is added here:
navigation, from the tables of ``docs/index.md``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ray_apr

project = "ray_apr"
release = version = ray_apr.__version__
copyright = "the authors of ray_apr"

# The source is the repository, so that links from page to page are the same here and there.
root_doc = "docs/index"
include_patterns = [
    "*.md",
    "docs/*.md",
    "deploy/**.md",
    "examples/*/README.md",
    "benchmarks/results/README.md",
]
exclude_patterns = [".*", "build", "dist", "ray_apr", "runs", "tests", "**/runs", "AGENTS.md"]

extensions = ["myst_parser", "sphinx_copybutton"]
myst_heading_anchors = 4
highlight_language = "none"

html_theme = "furo"  # brings its own scripts and styles; system fonts
html_title = f"ray_apr {release}"
html_copy_source = False
html_show_sphinx = False
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True

SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
ENTRY = re.compile(r"^\| \[[^\]]+\]\(([^)#]+)\.md\)", re.MULTILINE)


def toctrees(index: str) -> str:
    """A hidden table of contents for each section of the index, of the pages in its tables."""
    _, *parts = SECTION.split(index)
    return "\n".join(
        "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *ENTRY.findall(text)])
        + "\n```\n"
        for caption, text in zip(parts[::2], parts[1::2], strict=True)
    )


def on_source_read(app: Any, docname: str, source: list[str]) -> None:
    """Add to a page what only the site needs."""
    if docname == root_doc:
        source[0] += "\n" + toctrees(source[0])


def on_build_finished(app: Any, exception: Exception | None) -> None:
    """Lead from the top of the site to its first page."""
    if exception is None and app.builder.format == "html":
        page = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">\n'
        (Path(app.outdir) / "index.html").write_text(page, encoding="utf-8")


def setup(app: Any) -> None:
    """Connect the above."""
    app.connect("source-read", on_source_read)
    app.connect("build-finished", on_build_finished)
