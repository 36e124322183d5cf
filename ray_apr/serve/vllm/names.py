"""Names by which vLLM finds what is ours in its processes."""

SCHEDULER = "ray_apr.serve.vllm.scheduler.make_scheduler"
"""What vLLM is told to make its scheduler by."""
PARKING_SCHEDULER = "ray_apr.serve.vllm.scheduler.make_parking_scheduler"
"""The same, where requests stay in the engine core while their calls are interrupted."""
PARKING_LIMIT_S = 2.0
"""How long such a request goes on that no call takes over: the way of its sample to the rollout
worker and back, on a slow machine. What it makes beyond that is likely to be for nothing."""
WORKER_EXTENSION = "ray_apr.serve.vllm.probe.WeightProbe"
"""What vLLM's workers are extended by."""
MOST_REQUESTS = "ray_apr_most_requests"
"""Key of ``additional_config``: for how many requests a worker has a KV cache at most."""
PROBE = "ray_apr_probe"
"""Its method."""
ENGINES = "engines"
"""Name of the fork server of servers and their cores."""
