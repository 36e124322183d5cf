"""``import ray_apr`` is light: heavy packages load on first use."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from ray_apr.core import imports
from ray_apr.data import tokenizers
from ray_apr.run.model import check_hub_model
from tests.run_specs import run_spec

BASE_MODEL = Path(__file__).parents[2] / "examples" / "arithmetic" / "base_model"
HEAVY = ("torch", "vllm", "ray", "transformers", "numpy", "pyarrow")


def python(code: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return run.stdout.strip()


def test_importing_the_package_loads_nothing_heavy():
    code = f"import ray_apr, sys; print([m for m in {HEAVY} if m in sys.modules])"
    assert python(code) == "[]"


def test_the_settings_load_nothing_heavy_either():
    code = "import ray_apr, sys; ray_apr.RolloutConfig(); "
    code += f"print([m for m in {HEAVY} if m in sys.modules])"
    assert python(code) == "[]"


def test_a_run_can_be_made_without_torch():
    """It takes seconds, which the start of Ray would wait for."""
    code = "import ray_apr.trainer, sys; "
    code += "print([m for m in ('torch', 'transformers', 'vllm') if m in sys.modules])"
    assert python(code) == "[]"


def test_what_is_imported_while_ray_starts_is_there_before_anything_else_is():
    """known fault: main and another thread imported AutoTokenizer at once, and one had an error; a
    process that ends in the midst of an import of torch crashes."""
    code = (
        "import sys, threading\n"
        "from ray_apr.core.imports import imported_meanwhile\n"
        "from ray_apr.data.tokenizers import load_tokenizer\n"
        "with imported_meanwhile():\n"
        "    print('transformers.models.auto.tokenization_auto' in sys.modules)\n"
        f"    print(load_tokenizer({str(BASE_MODEL)!r}).eos_token_id is not None)\n"
        "    with imported_meanwhile():\n"
        "        print(len(threading.enumerate()))\n"
        "print([t.name for t in threading.enumerate()])\n"
        "print('AutoTokenizer' in dir(sys.modules['transformers.models.auto.tokenization_auto']))"
    )
    assert python(code).splitlines() == ["False", "True", "1", "['MainThread']", "True"]


@pytest.fixture
def slow_module(tmp_path, monkeypatch):
    """Whether it is imported that stands for what loads a tokenizer."""
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(0.3)\ndone = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(imports, "_TOKENIZERS", "slow_module")
    monkeypatch.delitem(imports._THREADS, "slow_module", raising=False)
    monkeypatch.delitem(sys.modules, "slow_module", raising=False)
    return lambda: getattr(sys.modules.get("slow_module"), "done", False)


@pytest.mark.parametrize(
    "use",
    [
        lambda: tokenizers._load.__wrapped__("a/b", True),
        lambda: tokenizers.end_token_ids("a/b"),
        lambda: tokenizers.num_token_ids("a/b", None),
        lambda: check_hub_model("a/b"),
        lambda: replace(run_spec(), model="a/b").max_prompt_tokens(),
    ],
    ids=["tokenizer", "ends", "ids", "hub", "context"],
)
def test_who_imports_from_transformers_waits_for_the_thread_that_does(
    use, slow_module, monkeypatch
):
    seen = []

    class Transformers(ModuleType):
        def __getattr__(self, name):
            seen.append(slow_module())
            raise AttributeError(name)

    monkeypatch.setitem(sys.modules, "transformers", Transformers("transformers"))
    with imports.imported_meanwhile(), pytest.raises(ImportError):
        use()
    assert seen[0]


def test_what_is_imported_meanwhile_is_there_after_the_block(slow_module):
    with imports.imported_meanwhile():
        assert not slow_module()
    assert slow_module()


def test_every_public_name_has_a_home():
    import ray_apr

    assert set(ray_apr.__all__) == {name for name in dir(ray_apr) if not name.startswith("_")}
    for name in ray_apr.__all__:
        assert getattr(ray_apr, name).__name__ == name
