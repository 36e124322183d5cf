"""Programs beside a run: simulator, reports, dashboards."""
