"""Names by which vLLM finds what is ours in its processes."""

SCHEDULER = "ray_apr.serve.vllm.scheduler.make_scheduler"
"""What vLLM is told to make its scheduler by."""
WORKER_EXTENSION = "ray_apr.serve.vllm.probe.WeightProbe"
"""What vLLM's workers are extended by."""
PROBE = "ray_apr_probe"
"""Its method."""
