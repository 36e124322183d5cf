"""From a run folder to summary.json and report.html."""
