"""Names that parts share which do not import each other."""

INGRESS = "RolloutIngress"
SCHEDULER = "ray_apr.serve.scheduler.make_scheduler"
"""What vLLM is told to make its scheduler by."""
WORKER_EXTENSION = "ray_apr.serve.probe.WeightProbe"
"""What vLLM's workers are extended by."""
PROBE = "ray_apr_probe"
"""Its method."""
