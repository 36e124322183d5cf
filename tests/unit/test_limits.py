"""What ends a wait that nothing else ends, and what a person then reads (docs/waits.md)."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.schema import ApplicationStatus

from ray_apr.config import EngineConfig, EvaluationConfig, RolloutConfig
from ray_apr.core.exceptions import (
    EngineDiedError,
    EngineUnavailableError,
    ResourceError,
    RolloutError,
    StarvedError,
)
from ray_apr.rollout import worker as worker_module
from ray_apr.run import controller, host, preflight
from ray_apr.serve import builder, lease
from ray_apr.serve.vllm import calls as calls_module
from ray_apr.serve.vllm import core as core_module
from ray_apr.serve.vllm.calls import Calls
from ray_apr.serve.vllm.core import Core
from ray_apr.train import control as control_module
from ray_apr.train.control import RunControl
from tests.fakes import FixedPart
from tests.run_specs import run_spec


class Handle:
    """An actor all of whose calls give what they were asked."""

    def __getattr__(self, verb: str) -> Any:
        return SimpleNamespace(remote=lambda *args, **kwargs: verb)


class Ray:
    """Nothing of it ever answers; notes what is asked of it, with its limit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
        self.asked: list[tuple[Any, ...]] = []
        for name in ("wait", "cancel", "kill"):
            monkeypatch.setattr(module.ray, name, getattr(self, name))

    def wait(self, refs: list[Any], *, timeout: float, num_returns: int = 1) -> Any:
        self.asked.append(("wait", *refs, timeout))
        return [], refs

    def cancel(self, ref: Any, *, force: bool = False, recursive: bool = True) -> None:
        self.asked.append(("kill" if force else "cancel", ref))

    def kill(self, actor: Any) -> None:
        self.asked.append(("kill", actor))


# -- the start -------------------------------------------------------------------------------------


def served(status: ApplicationStatus, message: str) -> Any:
    deployment = SimpleNamespace(message=message)
    return SimpleNamespace(status=status, message="", deployments={"server": deployment})


@pytest.mark.parametrize(
    ("application", "reason"),
    [(None, "Serve gives no reason"), ("no node has 4 GPUs", "no node has 4 GPUs")],
)
def test_servers_that_do_not_start_say_what_serve_says(monkeypatch, application, reason):
    apps = {} if application is None else {"run": served(ApplicationStatus.DEPLOYING, application)}
    monkeypatch.setattr(builder.serve, "status", lambda: SimpleNamespace(applications=apps))
    monkeypatch.setattr(builder, "_POLL_S", 0.01)
    said = rf"not ready after 0\.05 s \(rollout\.engine\.start_timeout_s\): {reason}"
    with pytest.raises(ResourceError, match=said):
        builder._wait_until_running("run", 0.05, threading.Event())


def test_the_start_of_servers_ends_with_its_run(monkeypatch):
    monkeypatch.setattr(builder.serve, "status", lambda: SimpleNamespace(applications={}))
    cancelled = threading.Event()
    threading.Timer(0.05, cancelled.set).start()
    with pytest.raises(ResourceError, match="was cancelled"):
        builder._wait_until_running("run", 60.0, cancelled)


def colocated_parts(monkeypatch, *, start_timeout_s=0.01):
    """Parts of a run whose servers start for as long as it is not told to close."""
    parts = object.__new__(controller._Parts)
    engine = EngineConfig(placement="colocated", start_timeout_s=start_timeout_s)
    parts.spec = run_spec(rollout=RolloutConfig(num_replicas=2, engine=engine))
    parts._closing, parts._start_error = threading.Event(), None
    parts._servers = threading.Thread(target=parts._closing.wait, args=(30,), daemon=True)
    parts._servers.start()
    monkeypatch.setattr(parts, "_reason", lambda error: error, raising=False)
    return parts


def replicas(app, *engines):
    """Rows of Ray's table of actors."""
    return [{"Name": f"SERVE_REPLICA::{app}#{engine}#abc"} for engine in engines]


def test_engines_that_share_the_trainers_gpus_have_a_limit_to_get_theirs(monkeypatch):
    parts = colocated_parts(monkeypatch)
    there = [*replicas("another", "engine-0", "engine-1"), {"Name": ""}]
    there += replicas(parts.spec.name, "engine-1", "ingress")
    monkeypatch.setattr(builder, "living_actors", lambda: there)
    monkeypatch.setattr(builder, "_POLL_S", 0.01)
    with pytest.raises(ResourceError, match=r"1 of 2 processes after 0\.01 s .* cluster hold"):
        parts.fit()
    assert parts._closing.is_set(), "what starts them is told"


@pytest.mark.parametrize("names", [["engine-0", "engine-1"], []])
def test_train_workers_start_once_such_engines_have_their_gpus_or_cannot(monkeypatch, names):
    parts = colocated_parts(monkeypatch, start_timeout_s=20)
    monkeypatch.setattr(builder, "living_actors", lambda: replicas(parts.spec.name, *names))
    monkeypatch.setattr(builder, "_POLL_S", 0.01)

    class Placed(Exception):
        """As far as a test needs it."""

    def start(*_):
        raise Placed

    monkeypatch.setattr(controller, "watched_ranks", start)
    parts._side = SimpleNamespace(fail=None)
    if not names:
        parts._start_error = ResourceError("no such model")
        threading.Timer(0.05, parts._closing.set).start()
    expected = (
        pytest.raises(Placed) if names else pytest.raises(ResourceError, match="no such model")
    )
    with expected:
        parts.fit()


@pytest.mark.parametrize("name", ["mine-lease", "mine-lease-0a1b2c3d"])
def test_servers_of_a_killed_driver_are_waited_for_and_then_named(monkeypatch, name):
    """known fault: of a driver of an older version, whose lease had such digits, they were not."""
    there = [{"namespace": lease._NAMESPACE, "name": name}]
    monkeypatch.setattr(lease.ray.util, "list_named_actors", lambda all_namespaces: there)
    monkeypatch.setattr(lease, "_PAUSE_S", 0.01)
    monkeypatch.setattr(lease, "_GONE_S", 0.05)
    with pytest.raises(ResourceError, match=r"named mine .* within 0\.05 s; choose another run"):
        lease.wait_for_lease("mine")
    lease.wait_for_lease("another")
    monkeypatch.setattr(lease, "_GONE_S", 20.0)
    threading.Timer(0.02, there.clear).start()
    lease.wait_for_lease("mine")


def test_a_node_that_does_not_look_is_warned_of(monkeypatch, caplog):
    ray = Ray(monkeypatch, preflight)
    task = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda path: "look"))
    monkeypatch.setattr(preflight.ray, "remote", lambda **_: lambda function: task)
    assert preflight.nodes_without("/shared", ["a" * 56]) == set()
    assert f"node {'a' * 56} did not look for /shared within 60 s" in caplog.text
    assert ray.asked == [("wait", "look", 60.0), ("cancel", "look")]


# -- engines ---------------------------------------------------------------------------------------


async def test_a_call_that_does_not_get_into_vllm_is_an_engine_that_is_gone(monkeypatch):
    monkeypatch.setattr(calls_module, "CORE_LIMIT_S", 0.05)
    calls = Calls("engine-1", lambda number: None)
    with calls.going_in("request-1") as call:
        said = r"engine-1: a call did not get into vLLM within 0\.05 s"
        with pytest.raises(EngineUnavailableError, match=said):
            await calls.until_entered([call])
        call.entered.set()
        await calls.until_entered([call])


async def test_calls_that_end_one_by_one_cost_a_drain_as_much_as_they_are():
    """known fault: each end cost as much as there were calls, 3 s of the server for 1,024."""
    calls, num_tasks = Calls("engine-1", lambda number: None), 0
    calls.gate.clear()

    def make_task(loop, coroutine, **given):
        nonlocal num_tasks
        num_tasks += 1
        return asyncio.Task(coroutine, loop=loop, **given)

    with contextlib.ExitStack() as last:
        rest = [contextlib.ExitStack() for _ in range(100)]
        for number, stack in enumerate([last, *rest]):
            stack.enter_context(calls.going_in(f"request-{number}"))
        draining = asyncio.create_task(calls.drain())
        asyncio.get_running_loop().set_task_factory(make_task)
        for stack in rest:
            await asyncio.sleep(0)
            stack.close()
        await asyncio.sleep(0.01)
        assert not draining.done() and list(calls.inside) == ["request-0"]
    await asyncio.wait_for(draining, 5)
    assert num_tasks < 5 * len(rest)


async def test_a_drain_ends_as_the_gate_opens():
    calls = Calls("engine-1", lambda number: None)
    calls.gate.clear()
    with calls.going_in("request-1"):
        draining = asyncio.create_task(calls.drain())
        await asyncio.sleep(0.01)
        assert not draining.done()
        calls.gate.set()
        await asyncio.wait_for(draining, 5)


async def test_a_core_that_does_not_answer_is_dead(monkeypatch):
    monkeypatch.setattr(Core, "dead_error", KeyError)
    aborted: list[str] = []

    async def abort(ids: list[str]) -> None:
        aborted.extend(ids)

    core = object.__new__(Core)
    core._replica_id, core.is_hung = "engine-1", False
    core._calls = Calls("engine-1", lambda number: None)
    core._calls.gate.clear()
    handler = asyncio.get_running_loop().create_future()
    core.llm = SimpleNamespace(errored=False, output_handler=handler, abort=abort)
    with core._calls.going_in("request-1"):
        said = f"did not answer within {core_module.ANSWER_LIMIT_S:g} s"
        with pytest.raises(EngineDiedError, match=said):
            await core.ask(asyncio.sleep(30), limit_s=0.05)
        with pytest.raises(EngineDiedError, match=said):
            core.check_alive()
    assert aborted == ["request-1"], "its calls end with what has left it"
    assert core._calls.gate.is_set(), "those at the gate are told"


# -- the end ---------------------------------------------------------------------------------------


def test_an_evaluation_that_goes_on_too_long_is_interrupted_by_a_sleep(monkeypatch, caplog):
    ray = Ray(monkeypatch, control_module)
    monkeypatch.setattr(RunControl, "_until_drained", lambda *_: None)
    monkeypatch.setattr(control_module, "failure_of", lambda buffer: None)
    control = RunControl(
        buffer=None, worker=FixedPart(Handle()), recorder=None, sync_timeout_s=5.0,
        evaluator=Handle(), evaluation=EvaluationConfig(timeout_s=7.0),
    )  # fmt: skip
    now = iter([100.0, 100.0, 102.0, 104.0, 106.0, 107.0])
    monkeypatch.setattr(control_module, "time", SimpleNamespace(monotonic=lambda: next(now)))
    control.sleep_engines()
    assert [limit_s for *_, limit_s in ray.asked] == [2.0, 2.0, 2.0, 1.0]
    assert "an evaluation exceeds 7 s; it is interrupted" in caplog.text


async def test_rollout_loops_that_do_not_end_are_ended(monkeypatch, caplog):
    """known fault: an engine that did not answer took the run's last figures along."""
    monkeypatch.setattr(worker_module, "_STOP_PAUSE_S", 0.01)
    monkeypatch.setattr(worker_module, "_STOP_S", 0.4)
    monkeypatch.setattr(worker_module, "_ABORT_S", 0.05)
    num_aborts = 0

    async def abort(request_ids: Any) -> None:
        nonlocal num_aborts
        num_aborts += 1
        if num_aborts == 1:
            raise RolloutError("abort on 1 of 2 replicas: no answer within the time limit")
        if num_aborts == 2:
            await asyncio.sleep(30)

    worker = object.__new__(worker_module.RolloutWorker)
    worker._client = SimpleNamespace(abort=abort)
    loops = asyncio.create_task(asyncio.sleep(30))
    await worker._abort_until_done(loops)
    assert num_aborts > 2
    assert "rollout loops did not end within 0 s" in caplog.text
    with pytest.raises(asyncio.CancelledError):
        await loops


def hosted(monkeypatch: pytest.MonkeyPatch) -> tuple[host.HostedRun, Ray]:
    run = object.__new__(host.HostedRun)
    run.spec, run._gate, run._ended, run._num_lines = run_spec(), Handle(), "run", 0
    return run, Ray(monkeypatch, host)


def test_a_gate_that_does_not_answer_ends_the_session(monkeypatch):
    run, ray = hosted(monkeypatch)
    with pytest.raises(StarvedError, match="the gate of app did not answer for 80 s"):
        run.wait(3)
    assert ray.asked == [("wait", "run", 0), ("wait", "news", "run", 80.0)]


def test_a_session_that_does_not_stop_is_killed(monkeypatch, caplog):
    run, ray = hosted(monkeypatch)
    run.stop(after_s=2.0)
    assert ray.asked == [
        ("wait", "run", 2.0), ("cancel", "run"), ("wait", "run", 300.0), ("kill", "run"),
        ("wait", "run", 60.0), ("kill", run._gate),
    ]  # fmt: skip
    assert "app did not end within 300 s; it is killed" in caplog.text
