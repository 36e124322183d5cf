"""The garbage collector of a process that has made most of its objects."""

from __future__ import annotations

import gc


def freeze_heap() -> None:
    """Spare all objects that there are from later garbage collections.

    A full one looks at each object: at 400,000 when the rollout worker starts, for 0.24 s in which
    nothing is dispatched; at 560,000 in a train worker, for 0.4 s in which nothing is launched.
    Cycles among them are never freed: for a process that ends with the run.
    """
    gc.collect()
    gc.freeze()
