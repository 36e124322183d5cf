"""The pages: links lead somewhere, results are indexed, and named results exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ray_apr
from ray_apr import rewards

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
PAGES = sorted(
    page
    for folder in (".", "docs", "deploy", "examples", "benchmarks")
    for page in (ROOT / folder).glob("*.md" if folder == "." else "**/*.md")
)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", text_of(page)), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", h.replace("`", "").lower()) for h in headings]
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(FENCED.sub("", text_of(page))):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}"


def test_each_result_is_in_the_index_and_told_by_a_page() -> None:
    index = text_of(RESULTS / "README.md")
    rows = {row.split("`")[1]: row for row in index.splitlines() if row.startswith("| `")}
    assert set(rows) == {path.name for path in RESULTS.glob("*.json")}
    for name, row in rows.items():
        (page,) = LINK.findall(row)
        told = text_of((RESULTS / page).resolve())
        assert name in told, f"{page} does not name {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_pages_name_results_that_exist(page: Path) -> None:
    for name in re.findall(r"benchmarks/results/([\w.-]+\.json)", text_of(page)):
        assert (RESULTS / name).exists(), f"{page.name} names {name}"


def test_every_page_of_docs_is_in_its_index() -> None:
    listed = {link.partition("#")[0] for link in LINK.findall(text_of(ROOT / "docs/index.md"))}
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"} <= listed


def test_every_public_name_is_in_the_reference() -> None:
    names = [f"ray_apr.{name}" for name in ray_apr.__all__]
    names += [f"ray_apr.rewards.{name}" for name in rewards.__all__]
    told = re.findall(r"^\| `([\w.]+)` \|", text_of(ROOT / "docs/api.md"), re.MULTILINE)
    assert [name for name in names if name not in told] == []


def test_the_readme_is_short() -> None:
    assert len(text_of(ROOT / "README.md").splitlines()) <= 120
