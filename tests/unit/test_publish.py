"""Which steps have a weight sync, and who waits for whom (train/publish.py)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from ray_apr.core.exceptions import (
    NoEngineError,
    RolloutError,
    SyncBrokenError,
    WeightSyncError,
)
from ray_apr.train.publish import WeightPublisher


class Sender:
    """Counts what it gathered, and has it until it is released."""

    def __init__(self) -> None:
        self.gathered = 0
        self.staged: list[int] = []
        self.num_released = 0
        self.is_closed = False

    @property
    def has_weights(self) -> bool:
        return bool(self.staged)

    def gather(self) -> None:
        self.gathered += 1
        self.staged = [self.gathered]

    def release(self) -> None:
        self.staged = []
        self.num_released += 1

    def close(self) -> None:
        self.is_closed = True


class Control:
    """Rank 0's line to the servers: a broadcast takes until `arrived` is set."""

    retry_limit_s = 5.0

    def __init__(self, *, arrives=True, error=None, limit_s=5.0) -> None:
        self.arrived = threading.Event()
        if arrives:
            self.arrived.set()
        self.began = threading.Event()
        self.error = error
        self.sync_limit_s = limit_s
        self.is_draining = False
        self.num_connected = 0
        self.is_whole = True
        self.sent: list[int] = []
        self.spans: list[str] = []

    def connect(self, sender, *, timeout_s) -> None:
        self.num_connected += 1
        self.is_whole = True

    def is_group_whole(self) -> bool:
        return self.is_whole

    def broadcast(self, sender, policy_version):
        self.began.set()
        assert sender.staged
        assert self.arrived.wait(10)
        if self.error is not None:
            raise self.error
        self.sent.append(policy_version)
        sender.release()
        return {"stopped_s": 0.25}

    def record_span(self, what, start_s, end_s, *, actor="trainer") -> None:
        self.spans.append(actor)


def make(control, *, sync_every=1, overlaps=False, wait_limit_s=5.0, **given):
    sender = Sender()
    publisher = WeightPublisher(
        sender,
        control,
        sync_every=sync_every,
        overlaps=overlaps,
        timeout_s=5.0,
        wait_limit_s=wait_limit_s,
        **given,
    )
    return publisher, sender


def test_every_nth_step_is_sent_and_the_last_one_never():
    control = Control()
    publisher, sender = make(control, sync_every=2)
    for step in range(1, 7):
        times = publisher.after_step(step, step, is_last=step == 6)
        assert (times["weight_sync_s"] > 0) == (step in (2, 4))
    publisher.close()
    assert control.sent == [2, 4] and sender.gathered == 2
    assert control.num_connected == 1, "the group is built once"
    assert sender.is_closed


def test_without_overlap_a_step_waits_for_its_weights():
    control = Control(arrives=False)
    publisher, _ = make(control)
    threading.Timer(0.1, control.arrived.set).start()
    times = publisher.after_step(1, 1, is_last=False)
    assert control.sent == [1]
    assert times["weight_wait_s"] >= times["weight_sync_s"] >= 0.05
    assert times["generation_stopped_s"] == 0.25


def test_with_overlap_the_trainer_goes_on_and_one_sync_is_under_way_at_a_time():
    control = Control(arrives=False)
    publisher, sender = make(control, overlaps=True)
    assert publisher.after_step(1, 1, is_last=False)["weight_sync_s"] == 0.0
    assert control.began.wait(5) and not control.sent
    threading.Timer(0.1, control.arrived.set).start()
    times = publisher.after_step(2, 2, is_last=False)
    assert control.sent[0] == 1, "the sync before has ended before the next gather"
    assert times["weight_sync_s"] > 0.05 and times["generation_stopped_s"] == 0.25
    publisher.close()
    assert control.sent == [1, 2] and sender.gathered == 2


def test_weights_that_engines_have_lost_are_sent_again_unless_newer_ones_were_sent_since():
    control = Control(arrives=False)
    for publisher, sender in (make(control, overlaps=True), make(None, overlaps=True)):
        publisher.after_step(1, 1, is_last=False)
        threading.Timer(0.1, control.arrived.set).start()
        publisher.send_again(1, 1)  # ranks alike, once the sync before has ended
        assert sender.gathered == 2
        publisher.send_again(0, 1)
        assert sender.gathered == 2
        publisher.send_again(1, 2)  # of a run that does not sync after each step
        assert sender.gathered == 3
    assert control.sent == [1, 1, 2]


@pytest.mark.parametrize("last", [False, True])
def test_the_error_of_an_overlapped_sync_reaches_the_trainer(last):
    control = Control(error=WeightSyncError("a replica is gone"))
    publisher, _ = make(control, overlaps=True)
    publisher.after_step(1, 1, is_last=False)
    with pytest.raises(WeightSyncError, match="a replica is gone"):
        publisher.after_step(2, 2, is_last=last)


def test_a_sync_that_does_not_end_is_an_error_that_names_the_setting():
    control = Control(arrives=False, limit_s=0.05)
    publisher, _ = make(control, overlaps=True)
    publisher.after_step(1, 1, is_last=False)
    with pytest.raises(WeightSyncError, match=r"version 1 .*weight_sync_timeout_s"):
        publisher.close()
    control.arrived.set()


def test_a_sync_that_lets_responses_end_first_is_waited_for_however_long_it_takes():
    control, met = Control(arrives=False, limit_s=0.05), []
    publisher, _ = make(control, overlaps=True, meet=lambda: met.append(list(control.sent)))
    publisher.after_step(1, 1, is_last=False)
    control.is_draining = True
    threading.Timer(0.3, control.arrived.set).start()
    publisher.after_step(2, 2, is_last=True)
    assert control.sent == [1]
    assert met == [[], [1]], "the other ranks wait where rank 0 does, outside of the collectives"


def test_what_comes_after_the_gather_is_done_on_every_rank_before_the_weights_leave():
    for control in (Control(), None):
        sent_before: list[int] = []

        def after_gather(control=control, sent_before=sent_before):
            sent_before.append(len(control.sent) if control else 0)

        publisher, sender = make(control, after_gather=after_gather)
        publisher.publish(0, timeout_s=1.0)
        publisher.after_step(1, 1, is_last=False)
        assert sent_before == ([0, 1] if control else [0, 0])
        assert sender.gathered == 2


def test_other_ranks_only_gather():
    publisher, sender = make(None, overlaps=True)
    for step in (1, 2):
        publisher.after_step(step, step, is_last=False)
    publisher.close()
    assert sender.gathered == 2 and sender.is_closed


def test_other_ranks_go_on_while_engines_read_what_they_gathered():
    """Where engines share their devices, what is released there waits for rank 0."""
    publisher, sender = make(None, overlaps=True)
    received = threading.Event()
    sender.release = lambda: received.wait(10) and Sender.release(sender)
    publisher.after_step(1, 1, is_last=False)
    assert sender.staged == [1], "it went on before"
    threading.Timer(0.2, received.set).start()
    publisher.after_step(2, 2, is_last=False)
    publisher.close()
    assert sender.gathered == 2 and sender.num_released == 2


def test_another_rank_does_not_wait_for_rank_0_forever():
    publisher, sender = make(None, overlaps=True, wait_limit_s=0.05)
    ended = threading.Event()
    sender.release = lambda: ended.wait(10)
    publisher.after_step(1, 1, is_last=False)
    with pytest.raises(
        WeightSyncError, match=r"version 1 were not with the servers within 0\.05 s"
    ):
        publisher.after_step(2, 2, is_last=False)
    ended.set()


@pytest.mark.parametrize("control", [Control, lambda **_: None])
def test_ranks_meet_for_lost_weights_once_the_sync_under_way_has_ended(control):
    """The ranks meet in one group, in which the release of the last sync may still wait."""
    control, order = control(arrives=False), []
    publisher, sender = make(
        control, overlaps=True, meet=lambda: order.append(("meet", sender.num_released))
    )
    arrived = control.arrived if control else threading.Event()
    if control is None:
        sender.release = lambda: arrived.wait(10) and Sender.release(sender)
    publisher.after_step(1, 1, is_last=False)
    threading.Timer(0.1, arrived.set).start()
    order.clear()
    publisher.send_again(1, 1)
    assert order == [("meet", 1)]
    publisher.close()


def test_publish_sends_at_once_within_its_own_limit():
    control = Control()
    publisher, _ = make(control, overlaps=True)
    publisher.publish(7, timeout_s=1.0)
    assert control.sent == [7]


def test_a_server_that_came_or_went_between_two_syncs_makes_a_new_group():
    control = Control()
    publisher, _ = make(control)
    publisher.after_step(1, 1, is_last=False)
    control.is_whole = False
    publisher.after_step(2, 2, is_last=False)
    assert (control.sent, control.num_connected) == ([1, 2], 2)


def test_a_server_that_goes_during_a_sync_costs_it_one_more():
    class Dies(Control):
        def broadcast(self, sender, policy_version):
            if policy_version == 2 and self.num_connected == 1:
                self.is_whole = False  # it left, and did not arrive everywhere
                raise SyncBrokenError("broke off")
            return super().broadcast(sender, policy_version)

    control = Dies()
    publisher, sender = make(control)
    for step in (1, 2):
        publisher.after_step(step, step, is_last=False)
    assert (control.sent, control.num_connected, sender.gathered) == ([1, 2], 2, 2)
    assert not sender.staged, "their memory is free until the next gather"
    assert sender.num_released == 2, "once a sync: it may meet other ranks"


class Moments(Control):
    """The servers of a group, each of which may die, or fail once, at a moment of a sync."""

    def __init__(self, *servers: str, fails: Callable[[Moments, str], None]) -> None:
        super().__init__()
        self.servers = set(servers)
        self.members: set[str] = set()
        self.fails = fails
        self.order: list[str] = []

    def at(self, moment: str) -> None:
        self.order.append(moment)
        self.fails(self, moment)

    def connect(self, sender, *, timeout_s) -> None:
        self.members = set()
        self.at("join")
        self.members = set(self.servers)

    def is_group_whole(self) -> bool:
        return self.members == self.servers

    def broadcast(self, sender, policy_version):
        for moment in ("pause", "broadcast"):
            assert sender.staged
            self.at(moment)
        if not self.members & self.servers:
            raise NoEngineError("no rollout server runs")
        for moment in ("load", "resume"):  # who has died until here does not count any more
            self.fails(self, moment)
        self.sent.append(policy_version)
        return {"stopped_s": 0.25}


def dies(server: str, at: str, *, breaks: bool = True) -> Callable[[Moments, str], None]:
    def fails(control: Moments, moment: str) -> None:
        if moment == at and server in control.servers and (control.sent or at == "join"):
            control.servers.remove(server)
            if breaks:
                raise SyncBrokenError(f"{server} has died")

    return fails


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("moment", ["pause", "join", "broadcast"])
def test_a_server_that_dies_at_any_moment_leaves_the_group_and_the_others_get_the_weights(
    moment, overlaps
):
    """known fault: an engine core killed during a sync ended the run though another one lived."""
    control = Moments("a", "b", fails=dies("b", moment))
    publisher, sender = make(control, overlaps=overlaps)
    for step in (1, 2, 3):
        publisher.after_step(step, step, is_last=step == 3)
    publisher.close()
    assert (control.sent, control.members, sender.gathered) == ([1, 2], {"a"}, 2)
    assert control.order.count("join") == 2


@pytest.mark.parametrize("moment", ["load", "resume"])
def test_a_server_that_dies_once_the_weights_are_out_costs_no_second_sync(moment):
    control = Moments("a", "b", fails=dies("b", moment, breaks=False))
    publisher, _ = make(control)
    for step in (1, 2):
        publisher.after_step(step, step, is_last=False)
    assert (control.sent, control.order.count("broadcast")) == ([1, 2], 2)
    publisher.after_step(3, 3, is_last=False)
    assert (control.sent, control.members) == ([1, 2, 3], {"a"})


def test_a_run_without_any_engine_ends_with_that_reason():
    control = Moments("a", fails=dies("a", "pause", breaks=False))
    publisher, _ = make(control)
    publisher.after_step(1, 1, is_last=False)
    with pytest.raises(NoEngineError, match="no rollout server runs"):
        publisher.after_step(2, 2, is_last=False)


def test_a_sync_that_breaks_off_is_tried_again_while_all_servers_are_there():
    """known fault: one transient failure of a sync ended the run."""
    left = [SyncBrokenError("connection reset") for _ in range(2)]

    def fails(control: Moments, moment: str) -> None:
        if moment == "broadcast" and left:
            raise left.pop()

    control = Moments("a", "b", fails=fails)
    publisher, _ = make(control)
    publisher.after_step(1, 1, is_last=False)
    assert (control.sent, control.order.count("join")) == ([1], 3), "a new group each time"


@pytest.mark.parametrize("verb", ["is_group_whole", "connect", "expect_scores"])
def test_servers_that_do_not_answer_in_time_are_asked_again(monkeypatch, verb):
    """known fault: one unanswered call before the broadcast ended the run."""
    control = Control()
    check = SimpleNamespace(
        record=lambda version: None,
        announce=lambda control: control.expect_scores(1, ()),
        verify=lambda control: {},
    )
    control.expect_scores = lambda *_: None
    publisher, _ = make(control, check=check)
    publisher.after_step(1, 1, is_last=False)
    answer, left = getattr(control, verb), [RolloutError("no answer within the time limit")]
    control.is_whole = verb != "connect"

    def once_silent(*args, **kwargs):
        if left:
            raise left.pop()
        return answer(*args, **kwargs)

    monkeypatch.setattr(control, verb, once_silent)
    publisher.after_step(2, 2, is_last=False)
    assert control.sent == [1, 2] and not left


def test_a_sync_that_breaks_off_each_time_ends_after_a_few_tries():
    control = Control(error=SyncBrokenError("connection reset"))
    publisher, _ = make(control)
    with pytest.raises(SyncBrokenError, match="connection reset"):
        publisher.after_step(1, 1, is_last=False)
    assert 2 <= control.num_connected <= 5


def test_a_sync_that_would_fail_again_is_not_repeated():
    control = Control(error=WeightSyncError("other log-probs"))
    publisher, _ = make(control)
    with pytest.raises(WeightSyncError, match="other log-probs"):
        publisher.after_step(1, 1, is_last=False)
    assert control.num_connected == 1


def test_a_sync_that_has_used_its_limit_up_is_not_tried_again():
    control = Control(error=SyncBrokenError("no weights within 5 s"))
    control.retry_limit_s = -1.0
    publisher, _ = make(control)
    with pytest.raises(SyncBrokenError, match="no weights within"):
        publisher.after_step(1, 1, is_last=False)
    assert control.num_connected == 1


def test_shared_weights_that_were_freed_cannot_be_sent_again():
    class FreesThem(Control):
        def broadcast(self, sender, policy_version):
            sender.release()
            raise SyncBrokenError("engines could not be resumed")

    control = FreesThem()
    publisher, _ = make(control)
    with pytest.raises(SyncBrokenError, match="could not be resumed"):
        publisher.after_step(1, 1, is_last=False)
    assert control.num_connected == 1
