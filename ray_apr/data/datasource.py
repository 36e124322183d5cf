"""The sample buffer as an endless Ray Data stream: one dataset a rank, one row a step.

Ray Data reads ahead as far as it may, so the buffer holds it back: the read task waits in
`SampleBuffer.take` until a batch is chosen, which that of step k + 1 is shortly before step k ends,
and no later one. So it is read and fetched behind the step. What is handed out for step k is chosen
against policy version k, whatever Ray Data does.
A row without a batch is an order (`scheduling.orders`): `order_of` reads it.

Ray Data starts a read task again whose process has died. Its stream would begin anew, and a step be
lost: the buffer refuses that, and the run ends with the reason. A buffer that dies is followed by
another one, which says the same of each step.
"""

from __future__ import annotations

import functools
import logging
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray
from ray.data import DataContext, DataIterator, Dataset
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask
from ray.exceptions import ObjectLostError

from ray_apr.compat import ray as compat
from ray_apr.core.exceptions import ResourceError, one_line
from ray_apr.core.threads import in_thread
from ray_apr.data.parts import RESTART_LIMIT_S, Part, PartName
from ray_apr.data.store import opened
from ray_apr.scheduling.orders import Order, OrderKind

if TYPE_CHECKING:
    from ray_apr.scheduling.grant import BatchTicket

_ORDER = "order"
"""Column that rows without a batch have alone."""
LOGGING = "RAY_DATA_LOGGING_CONFIG"
"""Ray Data's variable for what it is to log."""
_CALL_TIMEOUT_S = 60.0
_PAUSE_S = 0.5


class SampleBufferDatasource(Datasource):
    """Batches of one train rank, as they are chosen.

    Args:
        buffer: Name of the `SampleBuffer` actor.
        rank: The train worker that reads this stream.
        poll_timeout_s: How long one call waits inside the buffer.
    """

    def __init__(self, buffer: PartName, *, rank: int, poll_timeout_s: float) -> None:
        super().__init__()
        self._read = functools.partial(_read, buffer, rank, poll_timeout_s)

    @property
    def supports_distributed_reads(self) -> bool:
        """False, so that the task runs on the driver's node: one that dies, or that is drained,
        takes no batch along."""
        return False

    def estimate_inmemory_data_size(self) -> int | None:
        """Unknown: the stream has no end."""
        return None

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: DataContext | None = None,
    ) -> list[ReadTask]:
        """One task, because the steps of a rank come in order."""
        metadata = BlockMetadata(num_rows=None, size_bytes=None, exec_stats=None, input_files=None)
        return [ReadTask(self._read, metadata)]


def _read(buffer: PartName, rank: int, poll_timeout_s: float) -> Iterator[pa.Table]:
    """Yield a table of one row for each step, and for each order, until the buffer is closed.

    Consumes: the buffer's tickets. Waits for: a full batch of the next step, then its samples.
    Unblocked by: the buffer (grant, group, close, failure), at the latest by its time limit;
    `RESTART_LIMIT_S` for samples that are lost. Produces: a row.

    Raises:
        ResourceError: If samples of a batch are lost, and do not come again.
    """
    part = Part(buffer, "sample buffer")
    limit_s = poll_timeout_s + _CALL_TIMEOUT_S
    last_step: int | None = None
    told: tuple[Order, ...] = ()
    reader, lost_at = uuid.uuid4().hex, 0.0
    while True:
        ticket: BatchTicket | None = part.ask(
            "take", rank, last_step, told, reader=reader, limit_s=limit_s
        )
        if ticket is None:
            continue
        if ticket.order is not None:
            told += (ticket.order,)
            yield pa.table(_row_of(ticket.order))
            continue
        if ticket.plan is None:
            return
        plan = ticket.plan
        wanted = plan.groups_of(rank)
        try:
            payload = opened([ticket.refs[i] for i in wanted], timeout_s=_CALL_TIMEOUT_S)
        except ObjectLostError as error:  # with the rollout worker that made it: another follows
            lost_at = lost_at or time.monotonic()
            if time.monotonic() - lost_at > RESTART_LIMIT_S:
                raise ResourceError(
                    f"samples of step {plan.step} were lost from Ray's object store, and did not "
                    f"come again within {RESTART_LIMIT_S:g} s: {one_line(error)}; see whether a "
                    "node ran out of memory or disk, then go on with the run (--resume)"
                ) from error
            time.sleep(_PAUSE_S)
            continue
        lost_at = 0.0
        row = plan.rank_batch(rank, dict(zip(wanted, payload, strict=True))).to_row()
        yield pa.table({name: pa.array([value]) for name, value in row.items()})
        last_step = plan.step


def rows_of(stream: DataIterator) -> Iterator[Mapping[str, Any]]:
    """Rows of a `sample_stream`, each as soon as it is there: column to list or number.

    Reads the first one at once, on a thread: Ray Data starts a process for it, which takes seconds
    in which the caller has other things to do.

    Waits for: the next row. Unblocked by: its read task, which has the buffer's limit.
    """
    compat.hand_on_blocks_at_once()
    if LOGGING not in os.environ:  # else 8 KB each five seconds, twice, in files that only grow
        logging.getLogger("ray.data").setLevel(logging.INFO)
    tables = iter(stream.iter_batches(batch_size=None, prefetch_batches=0, batch_format="numpy"))
    first = in_thread(lambda: next(tables, None), "first-row")

    def rows() -> Iterator[Mapping[str, Any]]:
        table = first.result()
        while table is not None:
            yield {name: column[0] for name, column in table.items()}
            table = next(tables, None)

    return rows()


def _row_of(order: Order) -> dict[str, list[Any]]:
    return {_ORDER: [order.kind.value], "step": [order.step], "lost": [order.lost_version]}


def order_of(row: Mapping[str, Any]) -> Order | None:
    """The order that a row is; None of a batch."""
    if _ORDER not in row:
        return None
    kind, step, lost_version = OrderKind(row[_ORDER]), int(row["step"]), int(row["lost"])
    return Order(kind, step, lost_version)


def sample_stream(
    buffer: PartName, *, rank: int, poll_timeout_s: float, name: str | None = None
) -> Dataset:
    """Make the endless dataset of one rank.

    Its read task reserves no CPU: where all of this node's are taken, it would never start.

    Every row becomes a block of its own at once; with Ray Data's usual block size nothing would be
    delivered before 128 MiB have come together.
    """
    context = DataContext.get_current()
    saved = context.target_max_block_size
    context.target_max_block_size = 1
    try:
        stream = ray.data.read_datasource(
            SampleBufferDatasource(buffer, rank=rank, poll_timeout_s=poll_timeout_s),
            override_num_blocks=1,
            num_cpus=0,
        )
        stream.set_name(name)  # what Ray Data's metrics and log call it
        return stream
    finally:
        context.target_max_block_size = saved
