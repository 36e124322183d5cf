"""Rollout worker and buffer that begin again beside the trainer, and who follows them."""

from __future__ import annotations

import json
import threading
import types
from collections import Counter

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from ray_apr.config import RolloutConfig
from ray_apr.core.exceptions import (
    APRError,
    ConfigError,
    FolderTakenError,
    ResourceError,
    RolloutError,
    StarvedError,
    TrainError,
)
from ray_apr.data import parts as parts_module
from ray_apr.data.fence import Fence
from ray_apr.data.parts import Living, Part, PartName
from ray_apr.data.resumption import Begin, Counters
from ray_apr.run import side as side_module
from ray_apr.run.side import RolloutSide
from ray_apr.train.answers import failure_of
from tests.run_specs import run_spec

# -- who calls them --------------------------------------------------------------------------------


BEGAN = Begin(step=3, policy_version=3, epoch=5)


class Generations:
    """Ray's table of names: what each of an actor's generations answers."""

    def __init__(self, monkeypatch, *answers) -> None:
        self.answers = [list(given) for given in answers]
        self.num_looked = 0
        monkeypatch.setattr(parts_module.ray, "get_actor", self.find)
        monkeypatch.setattr(parts_module.ray, "get", lambda answer, timeout: answer())
        monkeypatch.setattr(parts_module.time, "sleep", lambda seconds: None)

    def find(self, name, namespace):
        assert namespace == "ns"
        self.num_looked += 1
        number = int(name.partition("-")[2] or 0)
        if number >= len(self.answers) or not self.answers[number]:
            raise ValueError(f"no actor {name}")
        left = self.answers[number]

        def answer():
            value = left.pop(0)
            if isinstance(value, BaseException):
                raise value
            return value

        return types.SimpleNamespace(verb=types.SimpleNamespace(remote=lambda *_, **__: answer))


def part(**options) -> Part:
    return Part(PartName("buffer", "ns"), "sample buffer", **options)


def test_a_call_is_made_again_by_the_one_that_follows(monkeypatch):
    generations = Generations(monkeypatch, ["a", ActorDiedError()], ["b", "c"])
    asked = part()
    assert [asked.ask("verb", limit_s=1.0) for _ in range(3)] == ["a", "b", "c"]
    looked = generations.num_looked
    assert generations.answers[1] == [] and looked == 2


def test_one_that_cannot_be_reached_for_a_moment_has_not_died(monkeypatch):
    """known fault: a broken connection to the worker ended the run."""
    Generations(monkeypatch, [ActorUnavailableError("connection reset", None), "a"], ["b"])
    assert part().ask("verb", limit_s=1.0) == "a"


def test_several_may_have_died_since_the_last_call(monkeypatch):
    Generations(monkeypatch, [], [], ["c"])
    assert part().ask("verb", limit_s=1.0) == "c"


def test_an_answer_that_does_not_come_is_told_with_what_it_is_for(monkeypatch):
    Generations(monkeypatch, [GetTimeoutError("late")])
    with pytest.raises(StarvedError, match="waited 2 s for the sample buffer, to end step 3"):
        part().ask("verb", limit_s=2.0, what=", to end step 3")


def test_who_waits_for_the_next_one_hears_why_none_comes(monkeypatch):
    Generations(monkeypatch, [ActorDiedError()])
    failed = part(failure=lambda: ConfigError("rollout.journal.path", "/x", "cannot be reached"))
    with pytest.raises(ConfigError, match="cannot be reached"):
        failed.ask("verb", limit_s=1.0)
    Generations(monkeypatch, [ActorDiedError()])
    clock = iter(range(0, 1000, 100))
    monkeypatch.setattr(parts_module.time, "monotonic", lambda: next(clock))
    with pytest.raises(TrainError, match="sample buffer is dead, and no other one came within 180"):
        part().ask("verb", limit_s=1.0)


def test_two_threads_that_hear_of_one_death_follow_to_one_actor(monkeypatch):
    """known fault: the second one waited for the actor after the next, and the run ended."""
    Generations(monkeypatch, ["a"], ["b"], [])
    asked = part()
    first = asked.living()
    for _ in range(2):  # each has called the first one
        asked.follow(ActorDiedError(), first)
        assert asked.living().generation == 1
    assert asked.ask("verb", limit_s=1.0) == "b"


def test_one_thread_looks_for_the_next_one_while_the_others_wait(monkeypatch):
    generations = Generations(monkeypatch, ["a"], [])
    asked, looks = part(), threading.Event()
    first = asked.living()

    def sleep(seconds):
        looks.set()
        threading.Event().wait(0.01)

    monkeypatch.setattr(parts_module.time, "sleep", sleep)
    threads = [
        threading.Thread(target=asked.follow, args=(ActorDiedError(), first)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    looks.wait(5)
    generations.answers[1].append("b")
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert asked.living().generation == 1


def test_calls_that_belong_together_reach_one_actor(monkeypatch):
    """known fault: the second part of a weight sync reached a worker that knew nothing of it."""
    Generations(monkeypatch, ["a", ActorDiedError()], ["b"])
    asked = part()
    worker = asked.living()
    asked.follow(ActorDiedError(), worker)  # another thread
    assert worker.call("verb")() == "a"
    with pytest.raises(ActorDiedError):
        worker.call("verb")()


def test_one_that_cannot_be_reached_is_not_asked_for_ever(monkeypatch):
    Generations(monkeypatch, [ActorUnavailableError("connection reset", None)] * 20)
    clock = iter(range(0, 10_000, 100))
    monkeypatch.setattr(parts_module.time, "monotonic", lambda: next(clock))
    with pytest.raises(StarvedError, match="was not reached within 240 s, to end step 3"):
        part().ask("verb", limit_s=60.0, what=", to end step 3")


def test_a_failure_is_asked_of_the_buffer_that_follows_a_dead_one(monkeypatch):
    """known fault: who waited for the next worker asked the dead buffer until its limit."""
    reasons = [RolloutError("it has died 6 times")]

    class Names(Generations):
        def find(self, name, namespace):
            if name.startswith("worker"):
                raise ValueError(f"no actor {name}")
            found = super().find(name, namespace)
            return types.SimpleNamespace(failure=found.verb)

    Names(monkeypatch, [ActorDiedError()], [reasons])
    monkeypatch.setattr(parts_module.ray, "get", lambda answer, timeout: answer()[0])
    buffer = part()
    worker = Part(PartName("worker", "ns"), "rollout worker", lambda: failure_of(buffer))
    worker._living = Living(0, None)
    with pytest.raises(RolloutError, match="6 times"):
        worker.follow(ActorDiedError(), worker.living())


# -- who starts them -------------------------------------------------------------------------------


class Actor:
    """An actor that lives until `die`, or is ended well."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ended = threading.Event()
        self.error: Exception | None = None
        self.failure: APRError | None = None
        self.num_started = 0

    def __getattr__(self, verb: str):
        def remote(*args):
            return (self, verb, args)

        return types.SimpleNamespace(remote=remote)

    def die(self, error: Exception | None = None) -> None:
        self.error = error or ActorDiedError()
        self.ended.set()


class Cluster:
    """What of Ray and of the actors' maker a `RolloutSide` uses."""

    def __init__(self, monkeypatch, tmp_path, **settings) -> None:
        self.pairs: list[tuple[Actor, Actor]] = []
        self.failed_buffers: list[Actor] = []
        self.num_steps = self.dies_at_start = 0
        self.unreached: Counter[str] = Counter()
        """Calls by verb that do not reach their actor."""
        self.spec = run_spec(**settings)
        self.said: list[str] = []
        monkeypatch.setattr(type(self.spec), "folder", tmp_path)
        for name, value in (("get", self.get), ("wait", self.wait), ("kill", Actor.die)):
            monkeypatch.setattr(side_module.ray, name, value)
        for name in ("_FIRST_PAUSE_S", "_ASK_AGAIN_S", "_LOOK_S"):
            monkeypatch.setattr(side_module, name, 0.01)
        monkeypatch.setattr(side_module, "find_side_begin", self.find_begin)
        self.recorder = Actor("recorder")
        self.side = RolloutSide(
            self.spec, self, None, BEGAN, self.recorder, 0.0, self.said.append
        )  # fmt: skip

    def make_pipeline(self, prompts, begin, recorder, *, generation=0):
        assert generation == len(self.pairs)
        self.pairs.append((Actor(f"buffer {generation}"), Actor(f"worker {generation}")))
        return self.pairs[-1]

    def make_buffer(self, recorder, *, generation):
        self.failed_buffers.append(Actor(f"buffer {generation}"))
        return self.failed_buffers[-1]

    def find_begin(self, spec, began):
        assert began is BEGAN, "the trainer's begin, however often they begin again"
        assert all(actor.ended.is_set() for actor in self.pairs[-1]), "the journal is whole"
        return Begin(before=Counters(tokens_generated=7))

    def get(self, call, timeout=None):
        actor, verb, args = call
        if self.unreached[verb]:
            self.unreached[verb] -= 1
            raise ActorUnavailableError("connection reset", None)
        if verb == "start" and self.dies_at_start:
            self.dies_at_start -= 1
            actor.die()
        if actor.error is not None:
            raise actor.error
        if verb == "num_steps":
            return self.num_steps
        if verb == "start":
            actor.num_started += 1
        if verb == "fail":
            (actor.failure,) = args
        return None

    def wait(self, calls, num_returns, timeout):
        ended = [call for call in calls if call[0].ended.is_set()]
        if not ended:
            calls[0][0].ended.wait(timeout)
        return ended, []

    def until(self, condition) -> None:
        for _ in range(1000):
            if condition():
                return
            threading.Event().wait(0.01)
        raise AssertionError(self.said)

    def end(self) -> None:
        self.side.stop_watching()
        self.side.join()
        assert not self.side._watch.is_alive()


@pytest.mark.parametrize("victim", [0, 1])
def test_worker_and_buffer_begin_again_together(monkeypatch, tmp_path, victim):
    cluster = Cluster(monkeypatch, tmp_path)
    cluster.side.start()
    for number in range(3):
        cluster.num_steps += 1
        cluster.pairs[number][victim].die()
        cluster.until(lambda n=number: len((tmp_path / "restarts.jsonl").read_text().splitlines())
                      == n + 1 if (tmp_path / "restarts.jsonl").exists() else False)  # fmt: skip
    assert [worker.num_started for _, worker in cluster.pairs] == [1] * 4
    assert cluster.side.begin.before.tokens_discarded == {"lost": 7}
    assert cluster.side.worker is cluster.pairs[-1][1]
    cluster.end()


def test_before_the_engines_run_no_worker_is_started(monkeypatch, tmp_path):
    cluster = Cluster(monkeypatch, tmp_path)
    cluster.pairs[0][1].die()
    cluster.until((tmp_path / "restarts.jsonl").exists)
    assert cluster.pairs[1][1].num_started == 0
    cluster.side.start()
    assert cluster.pairs[1][1].num_started == 1
    cluster.end()


def test_a_broken_connection_is_no_death_and_a_good_end_ends_the_watch(monkeypatch, tmp_path):
    cluster = Cluster(monkeypatch, tmp_path)
    buffer, worker = cluster.pairs[0]
    worker.die(ActorUnavailableError("connection reset", None))
    cluster.until(lambda: worker.error is not None)
    worker.error = None
    cluster.until(lambda: not cluster.side._watch.is_alive())
    assert len(cluster.pairs) == 1 and buffer.failure is None
    cluster.end()


@pytest.mark.parametrize("victim", [0, 1])
def test_without_a_journal_the_trainer_hears_of_the_death_at_once(monkeypatch, tmp_path, victim):
    rollout = RolloutConfig(journal={"enabled": False})
    cluster = Cluster(monkeypatch, tmp_path, rollout=rollout)
    cluster.pairs[0][victim].die()
    told = [cluster.pairs[0][0]] if victim else cluster.failed_buffers
    cluster.until(lambda: told and told[-1].failure is not None)
    died = "rollout worker died" if victim else "sample buffer died"
    assert died in str(told[-1].failure) and "rollout.journal.enabled" in str(told[-1].failure)
    cluster.end()


@pytest.mark.parametrize("sleep", [True, False])
def test_beside_colocated_engines_they_begin_again_unless_these_sleep(monkeypatch, tmp_path, sleep):
    placement = RolloutConfig(engine={"placement": "colocated", "sleep": sleep})
    cluster = Cluster(monkeypatch, tmp_path, rollout=placement)
    why_not = cluster.side._may_begin_again()
    assert (why_not is None) == (not sleep)
    assert why_not is None or "engines that sleep" in why_not
    cluster.end()


def test_what_dies_again_and_again_without_a_step_ends_the_run(monkeypatch, tmp_path):
    cluster = Cluster(monkeypatch, tmp_path)
    for number in range(5):
        cluster.pairs[number][1].die()
        cluster.until(lambda n=number: len(cluster.pairs) == n + 2)
    cluster.pairs[5][1].die()
    cluster.until(lambda: cluster.side.buffer.failure is not None)
    assert "has died 6 times without a step" in str(cluster.side.buffer.failure)
    cluster.end()


def test_a_side_that_cannot_begin_again_says_why(monkeypatch, tmp_path):
    cluster = Cluster(monkeypatch, tmp_path)

    def find_begin(spec, began):
        raise ConfigError("rollout.journal.path", "/x", "cannot be reached")

    monkeypatch.setattr(side_module, "find_side_begin", find_begin)
    cluster.pairs[0][1].die()
    cluster.until(lambda: cluster.failed_buffers and cluster.failed_buffers[-1].failure)
    assert "cannot be reached" in str(cluster.failed_buffers[-1].failure)
    cluster.end()


def test_in_a_run_that_is_another_driver_s_nothing_begins_again(monkeypatch, tmp_path):
    cluster = Cluster(monkeypatch, tmp_path)
    Fence("another", str(tmp_path)).take()
    cluster.pairs[0][1].die()
    cluster.until(lambda: cluster.side.failure is not None)
    assert isinstance(cluster.side.failure, FolderTakenError) and len(cluster.pairs) == 1
    assert not (tmp_path / "restarts.jsonl").exists()
    cluster.end()


def test_a_worker_that_dies_at_its_own_start_is_one_more_death(monkeypatch, tmp_path):
    """known fault: a second death while they began again ended the run."""
    cluster = Cluster(monkeypatch, tmp_path)
    cluster.side.start()
    cluster.dies_at_start = 2
    cluster.pairs[0][1].die()
    cluster.until(lambda: len(cluster.pairs) == 4 and cluster.pairs[3][1].num_started)
    cluster.until(lambda: len((tmp_path / "restarts.jsonl").read_text().splitlines()) == 3)
    rows = [json.loads(line) for line in (tmp_path / "restarts.jsonl").read_text().splitlines()]
    assert [row["died"].partition(":")[0] for row in rows] == [
        "rollout worker died", *["rollout worker died at its start"] * 2
    ]  # fmt: skip
    assert sum("rollouts go on" in line for line in cluster.said) == 1
    cluster.pairs[3][0].die()
    cluster.until(lambda: len(cluster.pairs) == 5 and cluster.pairs[4][1].num_started)
    assert cluster.side.failure is None
    cluster.end()


def test_workers_that_all_die_at_their_start_end_the_run(monkeypatch, tmp_path):
    cluster = Cluster(monkeypatch, tmp_path)
    cluster.side.start()
    cluster.dies_at_start = 100
    cluster.pairs[0][1].die()
    cluster.until(lambda: cluster.side.failure is not None)
    assert len(cluster.pairs) == 6
    reason = str(cluster.side.failure)
    assert "died at its start" in reason and "has died 6 times without a step" in reason
    assert cluster.side.buffer.failure is cluster.side.failure
    cluster.end()


@pytest.mark.parametrize("num_tries", [2, 100])
def test_a_checkpoint_that_is_removed_while_it_is_read_is_one_more_death(
    monkeypatch, tmp_path, num_tries
):
    cluster = Cluster(monkeypatch, tmp_path)
    cluster.side.start()
    find_begin, tries = cluster.find_begin, []

    def removed(spec, began):
        tries.append(began)
        if len(tries) < num_tries:
            raise ResourceError("/c/checkpoint_3 cannot be read, or was removed meanwhile")
        return find_begin(spec, began)

    monkeypatch.setattr(side_module, "find_side_begin", removed)
    cluster.pairs[0][1].die()
    if num_tries == 2:
        cluster.until(lambda: len(cluster.pairs) == 2 and cluster.pairs[1][1].num_started)
    else:
        cluster.until(lambda: cluster.side.failure is not None)
        assert isinstance(cluster.side.failure, ResourceError) and len(tries) == 5
    cluster.end()


def test_a_start_whose_connection_breaks_is_told_again(monkeypatch, tmp_path):
    """known fault: it was taken for a death that the watch never saw, and no worker ran."""
    cluster = Cluster(monkeypatch, tmp_path)
    cluster.unreached["start"] = cluster.unreached["fail"] = 2
    cluster.side.start()
    assert cluster.pairs[0][1].num_started == 1
    cluster.side.fail(RolloutError("no server"))
    assert str(cluster.pairs[0][0].failure) == "no server" and not cluster.failed_buffers
    cluster.end()


def test_an_actor_that_is_not_reached_is_not_taken_for_dead(monkeypatch, tmp_path):
    """The journal would be read while it still writes."""
    cluster = Cluster(monkeypatch, tmp_path)
    cluster.unreached["wait_until_stopped"] = 3
    with pytest.raises(ActorDiedError):
        worker = Actor("worker")
        worker.die()
        side_module._ask(worker.wait_until_stopped.remote, 5.0)
    assert cluster.unreached["wait_until_stopped"] == 0
    cluster.end()


@pytest.mark.parametrize("buffer_is_dead", [False, True])
def test_any_thread_may_end_the_run_with_a_reason(monkeypatch, tmp_path, buffer_is_dead):
    """known fault: servers that did not start told a buffer that was dead."""
    cluster = Cluster(monkeypatch, tmp_path, rollout=RolloutConfig(journal={"enabled": False}))
    if buffer_is_dead:
        cluster.pairs[0][0].error = ActorDiedError()
    for text in ("the servers did not start", "something else"):
        cluster.side.fail(RolloutError(text))
    told = cluster.failed_buffers[0] if buffer_is_dead else cluster.pairs[0][0]
    assert str(told.failure) == str(cluster.side.failure) == "the servers did not start"
    cluster.pairs[0][1].die()
    cluster.until(lambda: not cluster.side._watch.is_alive())
    assert len(cluster.pairs) == 1, "nothing begins again"
    cluster.end()
