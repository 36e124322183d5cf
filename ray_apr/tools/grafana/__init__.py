"""The Grafana dashboard of ray_apr: its panels, its JSON, and where Ray's own Grafana finds it."""
