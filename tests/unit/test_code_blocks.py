"""Every block of code of the pages is executed or checked (tests/code_blocks.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ray_apr.core.exceptions import ConfigError
from ray_apr.data.resumption import LIST_FILE
from tests.code_blocks import (
    ROOT,
    Block,
    blocks,
    check_command,
    check_json,
    check_names,
    check_settings,
    commands,
)

PAGES = [
    page
    for pattern in (
        "README.md",
        "CONTRIBUTING.md",
        "docs/*.md",
        "deploy/**/*.md",
        "examples/*/*.md",
    )
    for page in sorted(ROOT.glob(pattern))
]
LANGUAGES = ("", "bash", "json", "jsonl", "python", "yaml")


def check(page: Path, folder: Path) -> None:
    """Check all code of a page, in its order; files of its blocks are made in a folder."""
    (folder / "examples").symlink_to(ROOT / "examples")
    namespace: dict[str, Any] = {"__name__": "page"}
    bound: set[str] = set()
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block}: what is {block.language!r}?"
        if block.name:
            (folder / block.name).parent.mkdir(exist_ok=True)
            (folder / block.name).write_text(block.text, "utf-8")
        if block.language == "python":
            check_names(block, namespace, bound)
            if "no-run" not in block.words:
                exec(compile(block.text, str(block), "exec"), namespace)
        elif block.language == "yaml":
            check_settings(block, folder)
        elif block.language == "json":
            check_json(block, folder)
    for words in commands(page):
        check_command(words, folder)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_is_true(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check(page, tmp_path)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("```python\nraise KeyError\n```\n", KeyError),
        ("```python no-run\nfrom ray_apr import Nothing\n```\n", AssertionError),
        ("```python no-run\ntrain(model)\n```\n", AssertionError),
        ("```python no-run\ndef reward(sample):\n    return sample.text\n```\n", AssertionError),
        (
            "```python no-run\nfrom ray_apr import TrainConfig\n\nTrainConfig(steps=-1)\n```\n",
            ConfigError,
        ),
        ("```yaml\ntrain: {stepps: 1}\n```\n", ConfigError),
        ("```yaml\ntrain: {}\ntrain: {}\n```\n", ConfigError),
        ("```yaml\nreward: gone.py:reward\n```\n", AssertionError),
        ("```bash\nmake nothing\n```\n", AssertionError),
        ("    python -m ray_apr train --nothing\n", AssertionError),
        ("Call `python -m ray_apr nothing` now.\n", AssertionError),
        ("```bash\npip install 'ray-apr[nothing]'\n```\n", AssertionError),
        (
            "    ray-apr train examples/arithmetic/quickstart.yaml --set train.steps=-1\n",
            ConfigError,
        ),
    ],
)
def test_what_is_untrue_is_found(tmp_path: Path, text: str, error: type[Exception]) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(error):
        check(page, tmp_path)


def test_the_best_evaluation_is_found_where_one_has_no_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """known fault: the page's code compared None with a number, and named checkpoints that a kill
    had cut off."""
    monkeypatch.chdir(tmp_path)
    run = Path("runs/my-run")
    for version in (2, 4, 6, 8):
        (run / f"checkpoint_{version}").mkdir(parents=True)
        progress = json.dumps({"policy_version": version})
        (run / f"checkpoint_{version}" / "progress.json").write_text(progress)
    whole = [{"checkpoint_dir_name": f"checkpoint_{version}"} for version in (2, 4, 6)]
    (run / LIST_FILE).write_text(json.dumps({"checkpoint_results": whole}))
    means = {0: 0.9, 2: None, 4: 0.5, 6: 0.25, 8: 0.75}
    rows = ({"policy_version": v, "reward_mean": mean} for v, mean in means.items())
    (run / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = blocks(ROOT / "docs/run_folder.md")
    (block,) = [b for b in page if b.language == "python" and "evaluations.jsonl" in b.text]
    exec(compile(block.text, str(block), "exec"), {})
    assert capsys.readouterr().out == f"version 4, reward 0.500: {run / 'checkpoint_4' / 'hf'}\n"


def test_blocks_are_read_with_names_and_lines(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n\n```python reward.py\nx = 1\n```\n\n    make test\n")
    first, second = blocks(page)
    assert first == Block(page, 3, "python", ("reward.py",), "x = 1\n")
    assert first.name == "reward.py"
    assert second == Block(page, 7, "", (), "make test\n")
