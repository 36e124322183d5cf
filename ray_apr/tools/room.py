"""Whether the machines of a run have room for more of its parts, as its folder tells."""

from __future__ import annotations

from ray_apr.tools.report.load import RunData
from ray_apr.tools.report.summary import engine_counts


def lacks(run: RunData, *, engines: int = 0, workers: int = 0) -> str | None:
    """What there is too little of for more engines or train workers.

    Args:
        run: What it recorded.
        engines: How many more.
        workers: Train workers, the same.

    Returns:
        ``"GPUs"`` or ``"CPU cores"``; None where there is room, or the run does not tell.
    """
    has = run.ranks[-1] if run.ranks else {}
    if "num_cpus" not in has:
        return None
    engine, scaling = run.config["rollout"]["engine"], run.config["scaling"]
    if engine["placement"] == "colocated":
        return None
    engines += engine_counts(run)[-1][1]
    workers += has["num_train_workers"]
    gpus, cores = 0, 0.0
    if engine["device"] == "cuda":
        gpus += engines * engine["tensor_parallel_size"]
    else:
        cores += engines * max(1.0, engine["num_cpus_per_replica"])
    if scaling["use_gpu"]:
        gpus += workers
    else:
        cores += workers
    if gpus > has["num_gpus"]:
        return "GPUs"
    return "CPU cores" if cores > has["num_cpus"] else None
