"""What Prometheus gets of a run: names and tags of a live scrape; every query of the dashboard."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_apr.cli.main import main
from ray_apr.core.metrics import SPECS
from ray_apr.tools.grafana.dashboard import FILE_NAME
from ray_apr.tools.grafana.panels import ROWS
from tests.whole_runs import free_port, living_parts, running_cluster, start_run

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(420)]

_REPORTS_EVERY = {"RAY_metrics_report_interval_ms": "1000"}
_SAMPLE = re.compile(r"^(\w+)\{(.*)\} ")
_SHOW_ALL = """
import sys, time, ray
from ray_apr.core.metrics import SPECS, Metrics
ray.init(address=sys.argv[1], log_to_driver=False)
metrics = Metrics("a-run")
verbs = {"counter": metrics.add, "gauge": metrics.set, "histogram": metrics.observe}
for spec in SPECS:
    verbs[spec.kind](spec.name, 2.0, **dict.fromkeys(spec.tag_keys, "x"))
print(f"http://{ray.nodes()[0]['NodeManagerAddress']}:{ray.nodes()[0]['MetricsExportPort']}/metrics")
sys.stdout.flush()
sys.stdin.read()
"""
CONFIG = """
global: {scrape_interval: 1s, scrape_timeout: 1s}
scrape_configs:
- job_name: ray
  static_configs: [{targets: ["%s"]}]
"""


@pytest.fixture
def env(marked) -> dict[str, str]:
    """A marked environment in which Ray reports its metrics every second."""
    return {**marked[1], **_REPORTS_EVERY, "RAY_AUTH_MODE": "disabled"}


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


def series_of(text: str) -> dict[str, set[str]]:
    """Name of each series of the run, and its labels."""
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match and 'run="a-run"' in match[2]:
            found.setdefault(match[1], set()).update(re.findall(r"(\w+)=", match[2]))
    return found


def test_prometheus_gets_the_names_and_tags_that_are_declared(env, tmp_path, monkeypatch):
    root = tmp_path / "metrics"
    monkeypatch.setenv("RAY_METRICS_OUTPUT_ROOT", str(root))
    env["RAY_METRICS_OUTPUT_ROOT"] = str(root)
    expected = {
        spec.exported + end: set(spec.all_tags)
        for spec in SPECS
        for end in (("_bucket", "_sum", "_count") if spec.kind == "histogram" else ("",))
    }
    with running_cluster(env) as (address, _):
        driver = subprocess.Popen(
            [sys.executable, "-c", _SHOW_ALL, address],
            env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        url = driver.stdout.readline().strip()
        deadline = time.monotonic() + 60
        while not expected.keys() <= (found := series_of(read(url))).keys():
            missing = expected.keys() - found.keys()
            assert time.monotonic() < deadline, f"{url}: missing {missing}, found {found.keys()}"
            time.sleep(1)
        driver.communicate(timeout=60)
        assert main(["dashboard", "install"]) == 0, "where Ray has told Grafana to look"
        names = {file.name for file in (root / "grafana/dashboards").iterdir()}
        assert names >= {"default_grafana_dashboard.json", FILE_NAME}
    for name, tags in expected.items():
        assert tags <= found[name], name


@contextlib.contextmanager
def prometheus(target: str, folder: Path, env: dict[str, str]) -> Iterator[str]:
    """A Prometheus that scrapes one node of Ray; yields its address."""
    (folder / "prometheus.yml").write_text(CONFIG % target)
    address = f"127.0.0.1:{free_port()}"
    with (folder / "prometheus.log").open("w") as log:
        server = subprocess.Popen(
            ["prometheus", f"--config.file={folder / 'prometheus.yml'}",
             f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"],
            env=env, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        yield f"http://{address}"
    finally:
        server.terminate()
        server.wait(timeout=30)


def has_data(server: str, expr: str) -> bool:
    """Whether a query of the dashboard has a number."""
    for variable, value in (("$__rate_interval", "1m"), ("$run", ".+"), ("$replica", ".+")):
        expr = expr.replace(variable, value)
    url = f"{server}/api/v1/query?{urllib.parse.urlencode({'query': expr})}"
    answer = json.loads(read(url))
    assert answer["status"] == "success", expr
    return any(sample["value"][1] != "NaN" for sample in answer["data"]["result"])


def target_of(dashboard: str) -> str:
    """Where the only node of a cluster is scraped."""
    nodes = json.loads(read(f"{dashboard}/nodes?view=summary"))["data"]["summary"]
    (node,) = [n["raylet"] for n in nodes]
    return f"{node['nodeManagerAddress']}:{node['metricsExportPort']}"


@pytest.mark.vllm
def test_every_query_of_the_dashboard_has_data_of_a_live_run(env, tmp_path):
    if shutil.which("prometheus") is None:
        pytest.skip("there is no prometheus on the PATH")
    waiting = {
        query.expr: panel.title for row in ROWS for panel in row.panels for query in panel.queries
    }
    settings = (
        "train.steps=60", "train.batch_size=32", "rollout.max_response_tokens=96",
        "evaluation.prompts=held_out.parquet", "evaluation.every=5",
    )  # fmt: skip
    with (
        running_cluster(env) as (address, dashboard),
        prometheus(target_of(dashboard), tmp_path, env) as server,
    ):
        joined = {**env, "RAY_ADDRESS": address}
        run = start_run(tmp_path, joined, *settings, log=tmp_path / "run.log")
        seen: list[str] = []
        while waiting and run.poll() is None:
            time.sleep(2)
            for expr in [expr for expr in waiting if has_data(server, expr)]:
                seen.append(f"{waiting.pop(expr)}: {expr}")
        said = (tmp_path / "run.log").read_text()[-3000:]
        assert not waiting, f"no data: {waiting}\nseen: {len(seen)}\n{said}"


@pytest.mark.vllm
def test_rays_tables_name_a_run_and_its_parts_and_ctrl_c_ends_it_whole(env, tmp_path):
    settings = (
        "train.steps=2000", "train.batch_size=16", "rollout.num_replicas=1",
        "scaling={num_workers: 1, use_gpu: false}", "evaluation.prompts=held_out.parquet",
    )  # fmt: skip
    wanted = {f"run-{part}" for part in ("buffer", "rollout", "recorder", "evaluator")}
    with running_cluster(env) as (address, dashboard):
        run = start_run(
            tmp_path, {**env, "RAY_ADDRESS": address}, *settings, log=tmp_path / "run.log"
        )
        trains: list[dict] = []
        names: set[str] = set()
        while not (trains and wanted <= names):
            assert run.poll() is None, (tmp_path / "run.log").read_text()[-3000:]
            time.sleep(2)
            with contextlib.suppress(OSError):  # 500 before there is a train run; it may be slow
                trains = json.loads(read(f"{dashboard}/api/train/v2/runs/v1"))["train_runs"]
                actors = json.loads(read(f"{dashboard}/logical/actors"))["data"]["actors"].values()
                names = {actor["name"].rpartition("-")[0] for actor in actors if actor["name"]}
        jobs = json.loads(read(f"{dashboard}/api/jobs/"))
        listed = json.loads(read(f"{dashboard}/api/v0/tasks?limit=10000"))["data"]["result"]
        while "\nstep" not in (said := (tmp_path / "run.log").read_text()):
            assert run.poll() is None, said[-3000:]
            time.sleep(0.5)
        run.send_signal(signal.SIGINT)
        code, said = run.wait(timeout=90), (tmp_path / "run.log").read_text()
        assert code == 130 and "stopped by you (Ctrl-C)" in said, said[-3000:]
        assert living_parts(address, env) == "[]"
    final = json.loads((tmp_path / "run" / "final.json").read_text())
    assert (final["status"], final["ledger_error"]) == ("stopped", 0)
    assert [train["name"] for train in trains] == ["run"]
    assert [job["metadata"].get("ray_apr_run") for job in jobs] == ["run"]
    called = [task["name"].rpartition(":")[2] for task in listed["result"]]  # behind an actor's own
    classes = {name.partition(".")[0] for name in called}
    own = {"RolloutWorker", "SampleBuffer", "RunRecorder", "Evaluator", "RewardWorker", "RunLease"}
    assert "TrainController" in classes and not classes & own, "their calls would fill Ray's store"
