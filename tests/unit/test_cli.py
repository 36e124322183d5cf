"""The command line: what it prints, and its exit codes."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import ray

from ray_apr.cli import doctor, launch
from ray_apr.cli import main as cli
from ray_apr.cli.settings import load_settings
from ray_apr.core.exceptions import ConfigError, ResourceError, StarvedError, Stopped
from ray_apr.rewards.sandbox import Sandbox

YAML = """\
model: base_model
prompts: prompts.jsonl
reward: task.py:reward
rollout: {group_size: 4, num_replicas: 2, max_response_tokens: 32}
train: {steps: 3, batch_size: 8}
scaling: {num_workers: 2, num_cpus_per_worker: 0.5}
ray: {num_cpus: 4}
"""
EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "base_model").symlink_to(EXAMPLE / "base_model")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1="}\n')
    (tmp_path / "task.py").write_text("def reward(sample):\n    return 1.0\n")
    (tmp_path / "tiny.yaml").write_text(YAML)
    return tmp_path / "tiny.yaml"


def run_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    rows = [{"step": 0, "time_s": 3.0, "reward_mean": 0.5}]
    (path / "metrics.jsonl").write_text(json.dumps(rows[0]) + "\n")
    return path


def test_dry_run_prints_the_plan_and_starts_nothing(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", str(config), "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["each step"]["groups"] == 2
    assert plan["generation"]["samples under generation"] == 16  # ceil(2.0 x 8)
    assert plan["generation"]["samples alive, at most"] == 32  # min(4 + 1, max_live_batches) x 8
    assert plan["resources"]["Ray CPUs reserved"] == 3.0  # 2 x 1 + 2 x 0.5
    assert plan["whole run"]["samples trained"] == 24
    stream = ["--set", "mode=stream"]
    assert cli.main(["train", str(config), "--dry-run", "--json", *stream]) == 0
    alive = json.loads(capsys.readouterr().out)["generation"]["samples alive, at most"]
    assert alive == 16 + 8  # known fault: 8, of 16 under generation, which have no age there
    assert cli.main(["train", str(config), "--dry-run", "--set", "mode=sync"]) == 0
    text = capsys.readouterr().out
    assert "samples alive, at most" in text
    assert "tiny-sync-" in text
    assert "reward: task.py:reward gives 1 for the response '' to prompts.jsonl, line 1" in text
    assert "nothing was started" in text
    assert not (config.parent / "runs").exists()
    assert not ray.is_initialized()


GOOD, CHAT = '{"prompt": "1+1="}', '{"prompt": [{"role": "user", "content": "1+1="}]}'


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.num_replicas=40", "want 41 CPUs together, the cluster has 4"),
        ("rollout.max_response_tokens=4000", "no room for a prompt in the model's context of 256"),
        ("rollout.http.port={port}", "cannot be opened"),
        ("reward=broken.py:reward", "raised ModuleNotFoundError: No module named 'no_such"),
        ("environment=broken.py:Tools", "raised ModuleNotFoundError"),
        ("reward=exits.py:reward", "importing exits.py raised SystemExit: 0"),
        ("run.storage_path=fine.jsonl", "fine.jsonl is none"),
        ("run.name=2024-13-45", "not valid YAML: month must be in 1..12"),
        ("train.seed=4294967296", "train.seed = 4294967296: must be below 2**32"),
        ("ray={{address: '127.0.0.1:{closed}'}}", "no Ray cluster can be joined there"),
        ("prompts=broken.jsonl", "broken.jsonl, line 5"),
        ("prompts=chat.jsonl", "has no chat template"),
        ("prompts=long.jsonl", "long.jsonl, line 3, prompt = '300 tokens': at most 224"),
        ("prompts=broken.parquet", "cannot be read"),
        ("prompts=[long.parquet]", "long.parquet, row 1, prompt = '300 tokens': at most 224"),
        ("prompts=[fine.jsonl, missing.jsonl]", "missing.jsonl, line 2, prompt = None: must be"),
        (
            "reward=raises.py:reward",
            "reward = 'raises.py:reward': raised KeyError: 'answer' (raises.py, line 2), for the "
            "response '' to prompts.jsonl, line 1",
        ),
        ("evaluation={{prompts: long.jsonl}}", "long.jsonl, line 3, prompt = '300 tokens'"),
    ],
)
def test_the_dry_run_refuses_what_the_run_would(
    config: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    files = {
        "broken.py": "import no_such_package_at_all\nreward = Tools = None\n",
        "exits.py": "import sys\ndef reward(sample):\n    return 1.0\nsys.exit(0)\n",
        "broken.jsonl": f'{GOOD}\n{GOOD}\n{GOOD}\n{GOOD}\n{{"prompt": \n',
        "chat.jsonl": CHAT,
        "raises.py": "def reward(sample):\n    return sample.row['answer']\n",
        "fine.jsonl": f"{GOOD}\n{GOOD}\n",
        "long.jsonl": f'{GOOD}\n\n{{"prompt": "{"1" * 300}"}}\n',
        "missing.jsonl": f'{GOOD}\n{{"answer": "2"}}\n',
    }
    for name, text in files.items():
        (config.parent / name).write_text(text)
    long = pa.table({"prompt": ["1+1=", "1" * 300], "answer": ["2", ""]})
    pyarrow.parquet.write_table(long, config.parent / "long.parquet")
    whole = (EXAMPLE / "prompts.parquet").read_bytes()
    (config.parent / "broken.parquet").write_bytes(b"PAR1" + b"x" * 100 + whole[104:])
    with socket.socket() as taken, socket.socket() as closed:
        for one in (taken, closed):
            one.bind(("127.0.0.1", 0))
        taken.listen()
        ports = {"port": taken.getsockname()[1], "closed": closed.getsockname()[1]}
        override = override.format(**ports)
        assert cli.main(["train", str(config), "--dry-run", "--set", override]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model=owner/a-name-on-the-hub", "is not on this machine"),
        ("prompts=strange.jsonl", "does not know 'x', in up to 1 rows"),
        ("prompts=strange.jsonl", "strange.jsonl, line 1 has no 'answer'"),
    ],
)
def test_the_dry_run_warns_of_what_it_cannot_know_or_may_be_meant(
    config: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    (config.parent / "strange.jsonl").write_text(f'{GOOD}\n{{"prompt": "x=", "answer": 1}}\n')
    assert cli.main(["train", str(config), "--dry-run", "--set", override]) == 0
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train", "none.yaml"], "no such file"),
        (
            ["train", "tiny.yaml", "--set", "train.step=1"],
            "train.step = 1: unknown key; did you mean steps? known: steps, ",
        ),
        (
            ["train", "tiny.yaml", "--set", "train.temperature=1"],
            "did you mean rollout.sampling.temperature or evaluation.temperature? known: steps, ",
        ),
        (
            ["train", "tiny.yaml", "--set", "train.lr=1"],
            "train.lr = 1: unknown key; did you mean learning_rate? known: steps, ",
        ),
        (
            ["train", "tiny.yaml", "--set", "lr=1"],
            "lr = 1: unknown key; did you mean train.learning_rate? known: mode, ",
        ),
        (
            ["train", "tiny.yaml", "--set", "rollout.temprature=0.8"],
            "did you mean rollout.sampling.temperature or evaluation.temperature? known: ",
        ),
        (
            ["train", "tiny.yaml", "--set", "rollout.num_generations=8"],
            "unknown key; did you mean group_size? known: ",
        ),
        (
            ["train", "tiny.yaml", "--set", "train.zzz=8"],
            "train.zzz = 8: unknown key; known: steps, ",
        ),
        (
            ["train", "tiny.yaml", "--set", "partial_rolout.mode=sync"],
            "unknown key; did you mean partial_rollout? known: mode, ",
        ),
        (
            ["train", "tiny.yaml", "--set", "train.mode=sync"],
            "unknown key; did you mean mode at the top level or trackers.wandb.mode? known: ",
        ),
        (
            ["train", "tiny.yaml", "--set", "learning_rate=1"],
            "learning_rate = 1: unknown key; did you mean train.learning_rate? known: mode, ",
        ),
        (
            ["train", "tiny.yaml", "--set", "rollout.engine.group_size=1"],
            "unknown key; did you mean rollout.group_size? known: ",
        ),
        (["train", "tiny.yaml", "--json"], "only with --dry-run"),
        (["report", "."], "is no run folder"),
        (["samples", "a"], "RUN_DIR = 'a': there is no such folder"),
        (["report", ".", "."], "--out"),
        (["report", *"......", "--out", "c.html"], "are more than 5; give fewer"),
    ],
)
def test_wrong_settings_exit_2_with_one_line(
    config: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert cli.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_unknown_command_exits_2() -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["fly"])
    assert caught.value.code == 2


def test_a_run_folder_is_not_used_twice(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = config.parent / "runs" / "mine"
    run_folder(run)
    assert cli.main(["train", str(config), "--set", "run.name=mine"]) == 2
    error = capsys.readouterr().err
    assert "holds a run already" in error
    assert f"with --resume (in YAML run.resume: true), or by `ray-apr resume {run}`" in error


def test_what_is_resumed_has_a_name_and_may_have_a_run(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["train", str(config), "--resume"]) == 2
    assert "run.resume = True: needs the run to go on with" in capsys.readouterr().err
    run_folder(config.parent / "runs" / "mine")
    begun = []
    monkeypatch.setattr(launch, "run_training", lambda settings, **_: begun.append(settings.run))
    assert cli.main(["train", str(config), "--resume", "--set", "run.name=mine"]) == 0
    assert begun[0].resume
    settings = load_settings(config, ["run.name=mine", "run.resume=true"])
    prompts = launch.read_prompts(settings.prompts)
    assert launch.make_trainer(settings, prompts, None).spec.name == "mine"
    with pytest.raises(ConfigError, match="holds a run already"):
        launch.make_trainer(load_settings(config, ["run.name=mine"]), prompts, None)


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (StarvedError("trainer starved: 3 of 8 groups wait for reward"), 1, "3 of 8 groups"),
        (OSError("no space left"), 1, "run again with -v"),
        (KeyboardInterrupt(), 130, "stopped by you (Ctrl-C)"),
        (Stopped(signal.SIGTERM), 143, "stopped by SIGTERM"),
    ],
)
def test_a_failed_run_keeps_its_error_and_gets_its_report(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    raised: BaseException,
    code: int,
    message: str,
) -> None:
    def fail(settings: Any, **_: Any) -> None:
        (run_folder(settings.run_dir) / "final.json").write_text("{}")
        raise raised

    monkeypatch.setattr(launch, "run_training", fail)
    assert cli.main(["train", str(config), "--set", "run.name=mine"]) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    is_stopped = isinstance(raised, KeyboardInterrupt)
    assert ("ray-apr resume" in captured.out) == is_stopped, "errors name --resume themselves"
    assert (config.parent / "runs" / "mine" / "report.html").is_file()


def test_training_ends_with_the_report(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def succeed(settings: Any, *, progress: Any, ray_log: Path) -> Path:
        progress("step 1/3")
        assert ray_log == settings.run_dir / "ray.log"
        return run_folder(settings.run_dir)

    monkeypatch.setattr(launch, "run_training", succeed)
    assert cli.main(["train", str(config), "--set", "run.name=mine"]) == 0
    text = capsys.readouterr().out
    assert "step 1/3" in text
    assert str(config.parent / "runs" / "mine" / "report.html") in text
    assert "took:    0 min 0" in text, "the clock of the person who waits"
    run = "runs/mine"
    last = f"next:    ray-apr samples {run}; ray-apr doctor {run}; ray-apr verify {run}"
    assert text.splitlines()[-1] == last


def test_report_of_one_run_and_of_two(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (run_folder(config.parent / name) for name in "ab")
    assert cli.main(["report", str(first)]) == 0
    assert "0.500  (of the only step)" in capsys.readouterr().out
    assert (first / "summary.json").is_file()
    assert cli.main(["report", str(first), str(second), "--out", "docs/c.html"]) == 0
    assert "wall time (s)" in capsys.readouterr().out
    assert (config.parent / "docs" / "c.html").is_file()
    with (first / "metrics.jsonl").open("a") as file:
        file.write("garbage\n{}\n")
    assert cli.main(["report", str(first)]) == 1
    assert "metrics.jsonl, line 2" in capsys.readouterr().err


def test_doctor_says_ok_or_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = doctor.Check(name="python", ok=True, seen="3.11")
    bad = doctor.Check(name="torch", ok=False, seen="No module", remedy="install it")
    monkeypatch.setattr(doctor, "run_checks", lambda: iter([good]))
    assert cli.main(["doctor"]) == 0
    assert "no problems" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "run_checks", lambda: iter([good, bad]))
    assert cli.main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "problem  torch" in text
    assert "-> install it" in text


def test_doctor_finds_a_cuda_torchvision_beside_a_cpu_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    wrong = {"torch": "2.13.0+cpu", "torchvision": "0.28.0", "torchaudio": "2.13.0+cpu"}
    check = doctor.check_cpu_build(wrong.get)
    assert not check.ok
    assert check.remedy.endswith("pip uninstall -y torchvision")
    assert doctor.check_cpu_build({"torch": "2.13.0+cpu"}.get).ok
    assert doctor.check_cpu_build({**wrong, "torch": "2.13.0"}.get).ok
    assert doctor.check_cpu_build({}.get).ok


@pytest.mark.parametrize(
    ("num_gpus", "nccl", "ok", "seen"),
    [
        ((True, "0"), None, True, "none, runs use the CPU"),
        ((False, "no torch"), None, False, "no torch"),
        ((True, "2"), (True, ""), True, "2"),
        ((True, "2"), (False, "no CuPy"), False, "2; no CuPy"),
    ],
)
def test_doctor_finds_gpus_between_which_no_weights_travel(num_gpus, nccl, ok, seen) -> None:
    """known fault: without CuPy it found no problem, and runs failed at their first weight sync."""
    answers = iter([num_gpus, nccl])
    check = doctor.check_gpus(lambda _: next(answers))
    assert (check.ok, check.seen) == (ok, seen)
    assert list(answers) == ([nccl] if nccl is None else [])
    assert ("extra `gpu`" in check.remedy) == (nccl is not None)


@pytest.mark.parametrize(
    ("is_kept", "is_written", "ok"),
    [(True, False, True), (False, True, True), (False, False, False)],
)
def test_doctor_knows_a_python_that_compiles_packages_in_each_process(
    monkeypatch, tmp_path, is_kept, is_written, ok
) -> None:
    monkeypatch.setattr(doctor.sys, "pycache_prefix", None)
    monkeypatch.setattr(doctor.sys, "dont_write_bytecode", not is_written)
    origin = tmp_path / "torch.py"
    kept = Path(doctor.cache_from_source(origin))
    if is_kept:
        kept.parent.mkdir()
        kept.touch()
    spec = SimpleNamespace(origin=str(origin))
    check = doctor.check_bytecode({"torch": spec, "vllm": None}.get)
    assert check.ok == ok
    assert check.seen == ("kept" if ok else "not kept for torch")
    assert "PYTHONPYCACHEPREFIX" in check.remedy


def test_doctor_measures_memory() -> None:
    assert not doctor.check_memory(2**30).ok
    assert doctor.check_memory(16 * 2**30).ok
    assert doctor.check_memory(None).ok
    assert not doctor.check_import("no_such_package_at_all").ok


@pytest.mark.parametrize(
    ("route", "seen"),
    [
        ("user_namespaces", "namespaces"),
        ("rlimits", "resource limits alone"),
        (None, "no sandbox works"),
    ],
)
def test_doctor_says_how_programs_would_run(
    monkeypatch: pytest.MonkeyPatch, route: Any, seen: str
) -> None:
    def find() -> Sandbox:
        if route is None:
            raise ResourceError("no sandbox works")
        return Sandbox(route=route)

    monkeypatch.setattr(doctor, "find_sandbox", find)
    check = doctor.check_sandbox()
    assert check.ok and check.seen.startswith(seen)


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    start = time.monotonic()
    command = [sys.executable, "-X", "importtime", "-m", "ray_apr", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert time.monotonic() - start < 5  # 0.1 s alone; the bound is for a loaded machine
    assert "train" in done.stdout
    folder = cli._TRAIN_EXAMPLE.split("init ")[1].split()[0]
    assert f"train {folder}/run.yaml " in cli._TRAIN_EXAMPLE
    for heavy in ("ray", "torch", "vllm", "numpy", "yaml"):
        assert f"| {heavy}\n" not in done.stderr.replace("  ", "")
