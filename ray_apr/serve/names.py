"""Names that parts share which do not import each other."""

DEPLOYMENT = "RolloutServer"
INGRESS = "RolloutIngress"
SCHEDULER = "ray_apr.serve.scheduler.make_scheduler"
"""What vLLM is told to make its scheduler by."""
