"""The site: all pages build without a warning, and need no network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INDEX = "# Pages\n\n## All\n\n| page | of |\n| --- | --- |\n| [a page](page.md) | it |\n"
LOADED = re.compile(r"<(?:script|img|link rel=\"(?:stylesheet|preload)\")[^>]*https?://[^>]*>")


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """As `make docs` does."""
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs"]
    return subprocess.run(
        [*command, "-d", str(out / "doctrees"), "-b", "html", str(source), str(out / "html")],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.slow
def test_all_pages_build_and_need_no_network(tmp_path: Path) -> None:
    built = build(ROOT, tmp_path)
    assert built.returncode == 0, built.stderr
    for page in (ROOT / "docs").glob("*.md"):
        assert (tmp_path / "html/docs" / f"{page.stem}.html").exists()
    for page in (tmp_path / "html").rglob("*.html"):
        assert not LOADED.findall(page.read_text(encoding="utf-8")), page
    assert (tmp_path / "html/index.html").exists()


def test_a_dead_link_is_an_error(tmp_path: Path) -> None:
    pages = tmp_path / "source/docs"
    pages.mkdir(parents=True)
    (pages / "index.md").write_text(INDEX)
    dead = ("gone.md", "#nowhere", "index.md#elsewhere")
    (pages / "page.md").write_text("# A page\n\n" + "".join(f"[a page]({link})\n" for link in dead))
    built = build(tmp_path / "source", tmp_path / "out")
    assert built.returncode != 0
    assert [name for name in ("gone", "nowhere", "elsewhere") if name not in built.stderr] == []
