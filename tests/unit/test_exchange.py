"""Requests and outcomes that share Serve calls (serve/exchange.py), with servers that are none."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from ray_apr.core.exceptions import EngineDiedError, EngineUnavailableError, RolloutError
from ray_apr.core.messages import Generation
from ray_apr.core.sample import FinishReason, Segment
from ray_apr.serve import exchange, mailbox
from ray_apr.serve.exchange import Exchange
from ray_apr.serve.mailbox import Mailboxes
from tests.fakes import generate_request


def generation(request_id: str, replica_id: str, num_tokens: int = 0) -> Generation:
    tokens = Segment(policy_version=0, token_ids=(7,) * num_tokens, logprobs=(0.0,) * num_tokens)
    return Generation(
        request_id=request_id,
        segments=(tokens,) if num_tokens else (),
        finish_reason=FinishReason.STOP,
        replica_id=replica_id,
    )


def none_is_late(late: Generation) -> None:
    pytest.fail(f"{late} came late")


class Server:
    """An engine whose calls end when the test says so, as `EngineHandle` leads to it.

    Attributes:
        holds: Whether a stream gives nothing, as Serve's do while there is no replica.
    """

    def __init__(self, replica_id: str) -> None:
        self.replica_id = replica_id
        self.mailboxes = Mailboxes()
        self.submitted: list[list[str]] = []
        self.num_asked = 0
        self.pieces: list[int] = []
        self.is_dead = self.holds = False
        self.clients: dict[str, str] = {}
        self.aborted: list[str] = []

    async def call(self, verb, *args, timeout_s):
        self._check()
        return self.replica_id if verb == "replica_id" else self._submit(*args)

    def tell(self, verb, request_ids):
        assert verb == "abort"
        self.aborted.extend(request_ids)

    def _submit(self, client_id, requests):
        self.submitted.append([request.request_id for request in requests])
        self.mailboxes.expect(client_id, len(requests))
        self.clients |= dict.fromkeys(self.submitted[-1], client_id)
        return self.replica_id

    async def stream(self, verb, client_id, replica_id):
        assert verb == "outcomes"
        if self.holds:
            await asyncio.Event().wait()
        self._check()
        self.num_asked += 1
        yield self.replica_id, []
        if replica_id != self.replica_id:
            return
        async for outcomes in self.mailboxes.stream(client_id):
            self._check()
            self.pieces += [] if outcomes is None else [len(outcomes)]
            yield self.replica_id, outcomes
        self._check()

    def _check(self) -> None:
        if self.is_dead:
            raise ActorDiedError()

    def end(self, request_id: str, outcome=None) -> None:
        outcome = outcome or generation(request_id, self.replica_id)
        self.mailboxes.put(self.clients[request_id], request_id, outcome)

    async def until_submitted(self, number: int) -> None:
        async with asyncio.timeout(5):
            while sum(map(len, self.submitted)) < number:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


@pytest.fixture
def servers(monkeypatch):
    monkeypatch.setattr(mailbox, "_LINGER_S", 0.02)
    monkeypatch.setattr(exchange, "_LISTEN_S", 0.05)
    return {name: Server(name) for name in ("a", "b")}


@pytest.fixture
async def client(servers):
    return Exchange(servers, none_is_late)


async def test_what_begins_together_goes_in_one_call_and_so_does_what_ends_together(
    client, servers
):
    futures = [client.post("a", generate_request(f"{i}")) for i in range(50)]
    await servers["a"].until_submitted(50)
    futures += [client.post("a", generate_request(f"{i}")) for i in range(50, 100)]
    await servers["a"].until_submitted(100)
    assert [len(call) for call in servers["a"].submitted] == [50, 50]
    for i in reversed(range(100)):
        servers["a"].end(f"{i}")
    found = await asyncio.wait_for(asyncio.gather(*futures), 5)
    assert [g.request_id for g in found] == [f"{i}" for i in range(100)]
    assert servers["a"].pieces == [100], "although they have begun in two calls"
    await asyncio.sleep(0.05)
    assert servers["a"].num_asked == 1 and not client._streams, "it owes nothing"


async def test_outcomes_are_held_back_as_long_as_asked_and_a_death_is_not(client, servers):
    futures = {name: client.post(name, generate_request(name)) for name in servers}
    for server in servers.values():
        await server.until_submitted(1)
    with client.held_back():
        servers["a"].end("a")
        await asyncio.sleep(0.05)
        assert servers["a"].pieces == [1] and not futures["a"].done()
        servers["b"].is_dead = True
        servers["b"].end("b")
        with pytest.raises(EngineDiedError):
            await asyncio.wait_for(futures["b"], 5)
    assert (await asyncio.wait_for(futures["a"], 5)).request_id == "a"


async def test_the_event_loop_turns_between_outcomes_that_come_at_once(client, servers):
    futures = [client.post("a", generate_request(f"{i}")) for i in range(100)]
    await servers["a"].until_submitted(100)
    for i in range(100):
        servers["a"].end(f"{i}")
    seen = set()
    while len(done := [f for f in futures if f.done()]) < 100:
        seen.add(len(done))
        await asyncio.sleep(0)
    assert {32, 64, 96} <= seen


async def test_a_replica_is_asked_again_while_it_owes_an_outcome(client, servers, monkeypatch):
    monkeypatch.setattr(mailbox, "STREAM_S", 0.01)
    future = client.post("a", generate_request("x"))
    await servers["a"].until_submitted(1)
    await asyncio.sleep(0.1)
    assert servers["a"].num_asked > 2
    servers["a"].end("x")
    assert (await asyncio.wait_for(future, 5)).replica_id == "a"


async def test_errors_are_outcomes(client, servers):
    future = client.post("a", generate_request("x"))
    await servers["a"].until_submitted(1)
    servers["a"].end("x", RolloutError("too long"))
    with pytest.raises(RolloutError, match="too long"):
        await asyncio.wait_for(future, 5)


async def test_requests_of_a_replica_that_dies_fail_and_no_others(client, servers, monkeypatch):
    monkeypatch.setattr(mailbox, "STREAM_S", 0.01)
    dying, living = client.post("a", generate_request("x")), client.post("b", generate_request("y"))
    await asyncio.gather(*(server.until_submitted(1) for server in servers.values()))
    servers["a"].is_dead = True
    with pytest.raises(EngineDiedError):
        await asyncio.wait_for(dying, 5)
    late = client.post("a", generate_request("z"))
    with pytest.raises(EngineUnavailableError):
        await asyncio.wait_for(late, 5)
    servers["b"].end("y")
    assert (await asyncio.wait_for(living, 5)).replica_id == "b"


@pytest.mark.parametrize("is_held", [False, True])
async def test_requests_of_a_replica_that_was_replaced_fail_at_once(
    client, servers, monkeypatch, is_held
):
    """Also where Serve holds a stream back until there is another replica."""
    monkeypatch.setattr(mailbox, "STREAM_S", 0.01)
    server = servers["a"]
    future = client.post("a", generate_request("x"))
    await server.until_submitted(1)
    if is_held:
        server.holds = server.is_dead = True
    else:
        server.replica_id = "another"
    with pytest.raises(EngineDiedError, match="ActorDiedError" if is_held else "a is gone"):
        await asyncio.wait_for(future, 5)
    server.holds = server.is_dead = False
    later = client.post("a", generate_request("y"))
    await server.until_submitted(2)
    server.end("y")
    assert (await asyncio.wait_for(later, 5)).replica_id == server.replica_id


async def test_steady_traffic_outlives_every_limit(servers, monkeypatch):
    monkeypatch.setattr(mailbox, "STREAM_S", 0.1)
    client = Exchange(servers, none_is_late)
    futures = []
    for i in range(40):
        futures.append(client.post("a", generate_request(f"{i}")))
        await servers["a"].until_submitted(i + 1)
        await asyncio.sleep(0.01)
        if i:
            servers["a"].end(f"{i - 1}")
    servers["a"].end("39")
    found = await asyncio.wait_for(asyncio.gather(*futures), 5)
    assert [g.request_id for g in found] == [f"{i}" for i in range(40)]
    assert servers["a"].num_asked > 3


async def test_any_error_on_the_way_ends_the_request_there_and_here(client, servers):
    server, servers["a"] = servers["a"], None
    with pytest.raises(EngineUnavailableError, match="NoneType"):
        await asyncio.wait_for(client.post("a", generate_request("x")), 5)
    servers["a"] = server
    future = client.post("a", generate_request("y"))
    await server.until_submitted(1)
    server.is_dead = True
    server.end("y")  # it dies with the outcome in its hands
    with pytest.raises(EngineUnavailableError):
        await asyncio.wait_for(future, 5)
    assert server.aborted == ["y"]
    assert not client._calls and not +client._num_calls


@pytest.mark.parametrize("follows", [True, False])
async def test_tokens_of_calls_that_failed_with_their_stream_are_told(servers, follows):
    """known fault: the engine had counted them, and nobody else: `ledger_error` in final.json."""
    server, late = servers["a"], []
    client = Exchange(servers, late.append)
    broken = asyncio.Event()
    stream = server.stream

    async def breaks(verb, client_id, replica_id):
        yield server.replica_id, []
        server.stream = stream
        await broken.wait()
        raise ActorUnavailableError("connection reset", None)

    server.stream = breaks
    failed = client.post("a", generate_request("x#0"))
    await server.until_submitted(1)
    await asyncio.sleep(0.05)
    broken.set()
    with pytest.raises(EngineUnavailableError, match="connection reset"):
        await asyncio.wait_for(failed, 5)
    await asyncio.sleep(0)
    assert server.aborted == ["x#0"]
    if follows:
        again = client.post("a", generate_request("x#1"))
        await server.until_submitted(2)
        server.end("x#1", generation("x#1", "a", 8))
        assert (await asyncio.wait_for(again, 5)).num_tokens == 8
    server.end("x#0", generation("x#0", "a", 5))
    async with asyncio.timeout(5):
        while client._streams:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert [(g.request_id, g.num_tokens) for g in late] == [("x#0", 5)]
    assert not client._calls and not +client._num_calls


async def test_tokens_of_a_caller_that_has_gone_are_told(servers):
    late: list[Generation] = []
    client = Exchange(servers, late.append)
    future = client.post("a", generate_request("x"))
    await servers["a"].until_submitted(1)
    future.cancel()
    servers["a"].end("x", generation("x", "a", 5))
    async with asyncio.timeout(5):
        while not late:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert [g.num_tokens for g in late] == [5]


async def test_an_outcome_that_was_lost_on_the_way_is_an_error(client, servers):
    future = client.post("a", generate_request("x"))
    await servers["a"].until_submitted(1)
    servers["a"].mailboxes._box(servers["a"].clients["x"]).num_owed -= 1  # somebody took it
    with pytest.raises(EngineUnavailableError, match="a: outcomes are lost"):
        await asyncio.wait_for(future, 5)
    await asyncio.sleep(0.05)
    assert not client._streams and not +client._num_calls


async def test_an_id_that_is_under_way_is_refused(client, servers):
    future = client.post("a", generate_request("x"))
    with pytest.raises(RolloutError, match="x is under way already"):
        client.post("b", generate_request("x"))
    await servers["a"].until_submitted(1)
    servers["a"].end("x")
    assert (await asyncio.wait_for(future, 5)).replica_id == "a"


async def test_a_request_that_was_withdrawn_in_time_is_not_sent(client, servers):
    futures = {i: client.post("a", generate_request(i)) for i in ("x", "y")}
    assert client.withdraw("a", "x")
    await servers["a"].until_submitted(1)
    assert servers["a"].submitted == [["y"]]
    assert not client.withdraw("a", "y"), "it is there already"
    futures["y"].cancel()
    servers["a"].end("y")
    await asyncio.sleep(0.02)
    assert futures["y"].cancelled()
    assert futures["x"].result().finish_reason is FinishReason.ABORT
    assert not client._calls and not +client._num_calls


async def test_an_engine_that_left_with_a_withdrawn_request_gets_others_once_it_is_back(
    client, servers
):
    """known fault: they were never sent, and waited for ever."""
    future = client.post("a", generate_request("gone"))
    assert client.withdraw("a", "gone") and future.done()
    left = servers.pop("a")
    await asyncio.sleep(0.02)
    servers["a"] = left
    future = client.post("a", generate_request("next"))
    await left.until_submitted(1)
    left.end("next")
    assert (await asyncio.wait_for(future, 5)).request_id == "next"


async def test_the_newest_reader_of_a_mailbox_gets_what_comes():
    mailboxes, found = Mailboxes(), {"old": [], "new": []}
    mailboxes.expect("client", 3)

    async def read(name):
        async for outcomes in mailboxes.stream("client"):
            found[name] += [request_id for request_id, _ in outcomes or ()]

    readers = []
    for name in found:
        readers.append(asyncio.create_task(read(name)))
        await asyncio.sleep(0.02)
    await asyncio.wait_for(readers[0], 5)
    for i in range(3):
        mailboxes.put("client", f"{i}", generation(f"{i}", "a"))
    await asyncio.wait_for(readers[1], 5)
    assert found == {"old": [], "new": ["0", "1", "2"]}


async def test_a_client_that_comes_back_after_a_long_time_gets_all_its_outcomes():
    mailboxes = Mailboxes()
    mailboxes.expect("late", 1)
    mailboxes.put("late", "x", generation("x", "a"))
    assert [outcomes async for outcomes in mailboxes.stream("late")]
    mailboxes._boxes["late"].asked_at -= 2 * mailbox._ABANDONED_S
    mailboxes.expect("late", 2)
    for i in range(2):
        mailboxes.put("late", f"{i}", generation(f"{i}", "a"))
    (first, second), end = [outcomes async for outcomes in mailboxes.stream("late")]
    assert end is None
    assert (first[0], second[0]) == ("0", "1")


async def test_outcomes_of_a_client_that_is_gone_are_not_kept(monkeypatch):
    mailboxes = Mailboxes()
    mailboxes.expect("gone", 4)
    mailboxes.put("gone", "x", generation("x", "a"))
    monkeypatch.setattr(mailbox, "_ABANDONED_S", -1.0)
    for i in range(3):
        mailboxes.put("gone", f"{i}", generation(f"{i}", "a"))
    found, _ = [outcomes async for outcomes in mailboxes.stream("gone")]
    assert [request_id for request_id, _ in found] == ["2"]
    mailboxes.expect("other", 1)
    assert list(mailboxes._boxes) == ["other"]


async def test_thousands_of_outcomes_leave_the_event_loop_to_others_in_between(client, servers):
    futures = [client.post("a", generate_request(f"{i}")) for i in range(1000)]
    await servers["a"].until_submitted(1000)
    done: list[int] = []

    async def look() -> None:
        while len(done) < 1000:
            turns.append(len(done))
            await asyncio.sleep(0)

    turns: list[int] = []
    for future in futures:
        future.add_done_callback(lambda _: done.append(1))
    looking = asyncio.create_task(look())
    for i in range(1000):
        servers["a"].end(f"{i}")
    await asyncio.wait_for(looking, 5)
    assert servers["a"].pieces == [1000]
    steps = {later - earlier for earlier, later in itertools.pairwise(turns)}
    assert max(steps) <= 256 and turns[-1] >= 512, "not all at once"
