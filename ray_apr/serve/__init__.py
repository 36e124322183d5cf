"""Rollout servers: vLLM engines in one Ray Serve deployment, and the client of them."""
