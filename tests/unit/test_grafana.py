"""The Grafana dashboard: its queries against the metrics that there are (ray_apr/grafana)."""

from __future__ import annotations

import json
import re
from typing import get_args

import pytest

from ray_apr.cli.main import main
from ray_apr.core.exceptions import ConfigError
from ray_apr.core.ledger import DiscardReason
from ray_apr.core.metrics import SPECS
from ray_apr.tools.grafana import dashboard as module
from ray_apr.tools.grafana.dashboard import FILE_NAME, dashboard, install
from ray_apr.tools.grafana.panels import ROWS
from ray_apr.tools.grafana.queries import VLLM_METRICS

PANELS = [panel for row in ROWS for panel in row.panels]
KNOWN = {
    **{s.exported: {"run", *s.tag_keys} for s in SPECS if s.kind != "histogram"},
    **{
        s.exported + end: {"run", "le", *s.tag_keys}
        for s in SPECS
        if s.kind == "histogram"
        for end in ("_bucket", "_sum", "_count")
    },
    **{
        name + end: {"ReplicaId"}
        for name in VLLM_METRICS
        for end in (("_sum", "_count") if name.endswith("_seconds") else ("",))
    },
}
"""Each series that Prometheus has, and the labels that a query may use."""


def test_rows_are_what_an_operator_asks_in_this_order():
    assert [row.title for row in ROWS] == [
        "Is it learning?", "Is it fresh?", "Who waits?", "What is lost?", "Engines", "Trainer",
        "Weight syncs",
    ]  # fmt: skip


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_a_panel_says_what_it_shows_of_metrics_that_there_are(panel):
    assert panel.title and panel.description.endswith(".") and panel.queries
    assert panel.unit in {"s", "percentunit", "short", "none"}
    for query in panel.queries:
        used = re.findall(r"(ray_\w+)(\{[^}]*\})", query.expr)
        assert len(used) == len(re.findall(r"\bray_\w+", query.expr)), "a metric without labels"
        for name, labels in used:
            assert name in KNOWN, f"{panel.title}: no such metric: {name}"
            assert set(re.findall(r"(\w+)=", labels)) <= KNOWN[name]
            assert '=~"$run"' in labels or '=~"$replica"' in labels
        for label in re.findall(r"{{(\w+)}}", query.legend):
            assert any(label in KNOWN[name] for name, _ in used), query.legend
        assert query.expr.count("(") == query.expr.count(")")


def test_every_reason_of_discarded_tokens_is_told():
    """known fault: tokens were drawn as lost, of which the panel knew nothing."""
    (panel,) = (panel for panel in PANELS if panel.title == "Discarded tokens a second")
    reasons = panel.description.removeprefix("By reason: ").removesuffix(".").split(", ")
    assert sorted(reasons) == sorted(get_args(DiscardReason))


def test_every_metric_is_on_the_dashboard():
    shown = " ".join(query.expr for panel in PANELS for query in panel.queries)
    assert [s.name for s in SPECS if f"ray_{s.name}" not in shown] == []


def test_grafanas_model_has_each_panel_once_and_in_its_place():
    made = dashboard()
    plots = [p for p in made["panels"] if p["type"] == "timeseries"]
    assert [p["title"] for p in plots] == [panel.title for panel in PANELS]
    assert len({p["id"] for p in made["panels"]}) == len(made["panels"])
    taken = set()
    for panel in made["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in plots:
        assert panel["fieldConfig"]["defaults"]["unit"] and panel["description"]
        assert panel["datasource"]["uid"] == "${datasource}"


def test_the_source_and_the_runs_are_chosen_by_variables():
    source, run, replica = dashboard()["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == (
        "datasource", "datasource", "prometheus",
    )  # fmt: skip
    assert run["multi"] and run["includeAll"] and run["name"] == "run"
    for variable in (run, replica):
        query = variable["query"]["query"]
        metric, label = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", query).groups()
        assert label in KNOWN[metric]


def test_the_command_prints_the_dashboard(capsys):
    assert main(["dashboard", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == dashboard()


def test_the_command_writes_it_into_a_folder(tmp_path, capsys):
    assert main(["dashboard", "install", "--folder", str(tmp_path)]) == 0
    assert json.loads((tmp_path / FILE_NAME).read_text()) == dashboard()
    assert str(tmp_path / FILE_NAME) in capsys.readouterr().out


def test_it_goes_where_ray_looks(tmp_path, monkeypatch):
    for name in (module._OUTPUT_DIR, module._METRICS_ROOT, "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    latest = tmp_path / "ray/session_latest/metrics/grafana/dashboards"
    with pytest.raises(ConfigError, match="Ray makes its own when the head node starts"):
        install()
    latest.mkdir(parents=True)
    assert install() == latest / FILE_NAME
    root = tmp_path / "root/grafana/dashboards"
    root.mkdir(parents=True)
    monkeypatch.setenv(module._METRICS_ROOT, str(tmp_path / "root"))
    assert install() == root / FILE_NAME
    monkeypatch.setenv(module._OUTPUT_DIR, str(tmp_path))
    assert install() == tmp_path / FILE_NAME


def test_a_folder_that_is_not_there_is_a_usage_error(tmp_path, capsys):
    assert main(["dashboard", "install", "--folder", str(tmp_path / "none")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
