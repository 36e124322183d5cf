"""The vLLM adapter, and what runs inside of vLLM's own processes."""
