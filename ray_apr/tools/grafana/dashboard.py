"""The dashboard as Grafana's JSON, and the folder from which Ray's own Grafana takes dashboards."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

from ray_apr.core.exceptions import ConfigError
from ray_apr.tools.grafana.panels import ROWS, Panel

FILE_NAME = "ray_apr_grafana_dashboard.json"
_OUTPUT_DIR = "RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR"
_METRICS_ROOT = "RAY_METRICS_OUTPUT_ROOT"
_COLUMNS, _WIDTH, _HEIGHT = 24, 8, 8
"""Of Grafana's grid: of a row; of a panel."""
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard_json() -> str:
    """The dashboard, as Grafana imports it."""
    return json.dumps(dashboard(), indent=2) + "\n"


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana's own model."""
    return {
        "uid": "ray-apr",
        "title": "ray_apr",
        "description": "Runs of ray_apr: learning, freshness, waits, losses, engines, syncs.",
        "tags": ["ray", "ray_apr"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": _panels(),
    }


def install(folder: Path | None = None) -> Path:
    """Write the dashboard where a Grafana finds it.

    Args:
        folder: Folder of dashboards; None takes the one that Ray has told its Grafana.

    Returns:
        The file.

    Raises:
        ConfigError: If there is no such folder.
    """
    target = folder or ray_folder()
    if not target.is_dir():
        remedy = (
            "there is no such folder. Ray makes its own when the head node starts with a "
            f"dashboard; else say --folder, or set {_OUTPUT_DIR}"
        )
        raise ConfigError("--folder", str(target), remedy)
    file = target / FILE_NAME
    try:
        file.write_text(dashboard_json(), encoding="utf-8")
    except OSError as error:
        raise ConfigError("--folder", str(target), f"cannot be written to: {error}") from error
    return file


def ray_folder() -> Path:
    """Where Ray's head node has told Grafana to look for dashboards; it need not exist.

    Ray reads the same two variables; without them it is the newest session on this machine.
    """
    if output := os.environ.get(_OUTPUT_DIR):
        return Path(output)
    if root := os.environ.get(_METRICS_ROOT):
        return Path(root) / "grafana/dashboards"
    temporary = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    return Path(temporary) / "ray/session_latest/metrics/grafana/dashboards"


def _variables() -> list[dict[str, Any]]:
    """What is chosen at the top: the data source and the runs; hidden, the engines of the runs."""
    source = {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "hide": 0,
    }
    runs = _values_of("run", "label_values(ray_apr_rollout_inflight_samples, run)", hide=0)
    engines = 'label_values(ray_apr_server_running_requests{run=~"$run"}, replica)'
    return [source, runs, _values_of("replica", engines, hide=2)]


def _values_of(name: str, query: str, *, hide: int) -> dict[str, Any]:
    """A variable with the values of a label, all of which are chosen at first."""
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": "StandardVariableQuery"},
        "refresh": 2,  # whenever the time range changes
        "multi": True,
        "includeAll": True,
        "current": {"text": ["All"], "value": ["$__all"]},
        "sort": 2,
        "hide": hide,
    }


def _panels() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    ids = itertools.count(1)
    top = 0
    for row in ROWS:
        place = {"x": 0, "y": top, "w": _COLUMNS, "h": 1}
        made.append(
            {
                "id": next(ids),
                "type": "row",
                "title": row.title,
                "gridPos": place,
                "collapsed": False,
                "panels": [],
            }
        )
        top += 1
        per_line = _COLUMNS // _WIDTH
        for index, panel in enumerate(row.panels):
            line, column = divmod(index, per_line)
            place = {
                "x": column * _WIDTH,
                "y": top + line * _HEIGHT,
                "w": _WIDTH,
                "h": _HEIGHT,
            }
            made.append({"id": next(ids), "gridPos": place, **_panel(panel)})
        top += -(-len(row.panels) // per_line) * _HEIGHT
    return made


def _panel(panel: Panel) -> dict[str, Any]:
    limits = {} if panel.top is None else {"min": 0, "max": panel.top}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "custom": {"spanNulls": True}, **limits},
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend.strip(),
            }
            for index, query in enumerate(panel.queries)
        ],
    }
