"""Read tasks of Ray Data (data/datasource.py): where they run, and what they need."""

from __future__ import annotations

import pytest
import ray

from ray_apr.data.datasource import order_of, sample_stream
from ray_apr.data.parts import PartName
from ray_apr.scheduling.grant import BatchTicket
from ray_apr.scheduling.orders import Order, OrderKind

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180)]

ORDER = Order(OrderKind.CHECKPOINT, 4)


class Buffer:
    """Has one order, and then ends the stream."""

    def take(self, rank, last_step, told, *, reader):
        assert (rank, last_step) == (1, None) and reader
        return BatchTicket() if told else BatchTicket(order=ORDER)


class Busy:
    """Has all CPUs."""

    def is_there(self):
        return True


@pytest.fixture
def no_cpu():
    ray.init(num_cpus=1, include_dashboard=False, namespace="ns", log_to_driver=False)
    try:
        busy = ray.remote(Busy).options(num_cpus=1).remote()
        assert ray.get(busy.is_there.remote(), timeout=60)
        yield
    finally:
        ray.shutdown()


def test_a_stream_is_read_where_all_cpus_are_taken(no_cpu):
    """known fault: train workers took all CPUs, and none ever got a batch."""
    buffer = ray.remote(Buffer).options(name="buffer", num_cpus=0).remote()
    stream = sample_stream(PartName("buffer", "ns"), rank=1, poll_timeout_s=5.0)
    (row,) = stream.iter_rows()
    assert order_of(row) == ORDER
    ray.kill(buffer)
