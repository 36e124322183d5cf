"""Rollout servers: engines, each in a Ray Serve deployment of its own, and the client of them."""
