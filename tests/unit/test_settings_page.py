"""docs/settings.md is what the dataclasses say (tests/settings.py), and none of them is silent."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import pytest

from ray_apr.core.checks import at_least, positive, require, whole_or_none
from ray_apr.tools.simulator.cluster import ClusterConfig
from tests.cluster_file import keys
from tests.settings import docstrings, page, section_of, sections_of_yaml, with_inner

PAGE = Path(__file__).parents[2] / "docs/settings.md"
LEAST = 3


@dataclass(frozen=True, kw_only=True)
class Example:
    """Settings of a test."""

    size: int = 4
    """So much."""
    share: float = 0.5
    name: str | None = None
    """What None says."""

    def __post_init__(self) -> None:
        s = "example"
        sizes = ("size",)
        at_least(s, self, 1, *sizes)
        positive(s, self, "share")
        whole_or_none(s, self, 2, "name")
        require(self.size > LEAST, f"{s}.size", self.size, f"must exceed {LEAST}, {self.name}")


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text("utf-8") == page(), "python -m tests.settings > docs/settings.md"


def test_the_page_of_the_simulator_has_the_keys_of_a_cluster_file() -> None:
    text = (PAGE.parent / "simulator.md").read_text("utf-8")
    assert keys() in text, "python -m tests.cluster_file"


@pytest.mark.parametrize(
    "section",
    [*sections_of_yaml(), *with_inner(ClusterConfig, "cluster")],
    ids=lambda section: section[1],
)
def test_every_setting_says_what_it_is_for(section: tuple[type, str]) -> None:
    cls, _ = section
    assert [f.name for f in dataclasses.fields(cls) if f.name not in docstrings(cls)] == []


def test_a_section_has_types_bounds_defaults_and_rules() -> None:
    told = section_of(Example, "example")
    assert "| `size` | whole number at least 1 | `4` | So much. |" in told
    assert "| `share` | number above 0 | `0.5` |  |" in told
    assert "| `name` | text or `null` | `null` | What None says. |" in told
    assert "- `size`: must exceed 3, …\n" in told
