"""The site, which Sphinx makes of the pages in docs/ and of those beside code: ``make docs``.

The pages are Markdown that reads well on a code host, too. What only the site needs is added here:
navigation, from the tables of ``docs/index.md``, and what docstrings say, below each table of names
in ``docs/api.md``.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any

from sphinx.ext.autodoc.mock import mock

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

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_heading_anchors = 4
highlight_language = "none"

# Docstrings name things in `single` backticks. Heavy packages are not imported for their sake.
default_role = "code"
autodoc_mock_imports = ["pyarrow", "ray", "torch", "transformers", "vllm"]
autodoc_mock_imports += ["ray_apr.run.controller"]  # beyond it is what a run alone imports
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
maximum_signature_line_length = 88
napoleon_numpy_docstring = False

html_theme = "furo"  # brings its own scripts and styles; system fonts
html_title = f"ray_apr {release}"
html_copy_source = False
html_show_sphinx = False
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True

SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
NAME = re.compile(r"^\| `([\w.]+)` \|", re.MULTILINE)
ENTRY = re.compile(r"^\| \[[^\]]+\]\(([^)#]+)\.md\)", re.MULTILINE)


def toctrees(index: str) -> str:
    """A hidden table of contents for each section of the index, of the pages in its tables."""
    _, *parts = SECTION.split(index)
    return "\n".join(
        "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *ENTRY.findall(text)])
        + "\n```\n"
        for caption, text in zip(parts[::2], parts[1::2], strict=True)
    )


def reference(page: str) -> str:
    """The page with directives of autodoc below each of its tables of names."""
    head, *parts = SECTION.split(page)
    told = [head]
    for caption, text in zip(parts[::2], parts[1::2], strict=True):
        directives = "".join(map(directive, NAME.findall(text)))
        told.append(f"## {caption}{text}\n```{{eval-rst}}\n{directives}```\n\n")
    return "".join(told)


def directive(name: str) -> str:
    """That of a function, or of a class: of settings without the fields, which are on a page of
    their own."""
    module, _, attribute = name.rpartition(".")
    thing = getattr(importlib.import_module(module), attribute)
    if not isinstance(thing, type):
        return f".. autofunction:: {name}\n\n"
    fields = [field.name for field in dataclasses.fields(thing)] if is_config(thing) else []
    without = f"   :exclude-members: {', '.join(fields)}\n" if fields else ""
    return f".. autoclass:: {name}\n   :members:\n   :inherited-members: Exception\n{without}\n"


def is_config(thing: type) -> bool:
    """Whether a class is one of settings."""
    return dataclasses.is_dataclass(thing) and thing.__name__.endswith("Config")


def on_source_read(app: Any, docname: str, source: list[str]) -> None:
    """Add to a page what only the site needs."""
    if docname == root_doc:
        source[0] += "\n" + toctrees(source[0])
    elif docname == "docs/api":
        with mock(autodoc_mock_imports):
            source[0] = reference(source[0])


def on_signature(app: Any, what: str, name: str, obj: Any, options: Any, *signature: Any) -> Any:
    """Show a default that is made anew each time as an ellipsis, which Sphinx can read."""
    arguments, returns = signature
    return (arguments or "").replace("<factory>", "...") or None, returns


def on_build_finished(app: Any, exception: Exception | None) -> None:
    """Lead from the top of the site to its first page."""
    if exception is None and app.builder.format == "html":
        page = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">\n'
        (Path(app.outdir) / "index.html").write_text(page, encoding="utf-8")


def setup(app: Any) -> None:
    """Connect the above."""
    app.connect("source-read", on_source_read)
    app.connect("autodoc-process-signature", on_signature)
    app.connect("build-finished", on_build_finished)
