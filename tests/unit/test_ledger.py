"""Where the tokens are (core/ledger.py)."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_apr.core.exceptions import LedgerError
from ray_apr.core.ledger import LedgerSnapshot, TokenLedger


def test_life_of_a_token_over_two_actors():
    worker, buffer = TokenLedger(), TokenLedger()
    worker.generated(5)
    worker.generated(3)
    worker.move(8, "interrupted", "pending")
    assert worker.snapshot().pending == 8 and worker.snapshot().error == 0
    worker.hand_over(8)
    assert (worker.snapshot() + buffer.snapshot()).error == 8
    buffer.take_over(8)
    buffer.move(6, "buffered", "trained")
    buffer.discard(2, "buffered", "stale")
    total = worker.snapshot() + buffer.snapshot()
    assert (total.error, total.trained, total.discarded["stale"]) == (0, 6, 2)


def test_error_is_what_is_missing_or_counted_twice():
    assert LedgerSnapshot(generated=5, trained=3).error == 2
    assert LedgerSnapshot(generated=5, pending=3, discarded={"stale": 3}).error == -1


@pytest.mark.parametrize(
    "act",
    [
        lambda ledger: ledger.generated(-1),
        lambda ledger: ledger.move(5, "interrupted", "pending"),
        lambda ledger: ledger.move(1, "pending", "interrupted"),
        lambda ledger: ledger.hand_over(5),
        lambda ledger: ledger.take_over(-1),
        lambda ledger: ledger.move(-1, "interrupted", "trained"),
        lambda ledger: ledger.discard(5, "interrupted", "failed"),
        lambda ledger: ledger.discard(1, "interrupted", "boredom"),
    ],
)
def test_tokens_that_are_not_there_cannot_move(act):
    ledger = TokenLedger()
    ledger.generated(4)
    before = ledger.snapshot()
    with pytest.raises(LedgerError):
        act(ledger)
    assert ledger.snapshot() == before


def test_snapshot_is_a_copy_that_crosses_processes():
    ledger = TokenLedger()
    ledger.generated(4)
    snapshot = ledger.snapshot()
    ledger.discard(4, "interrupted", "shutdown")
    assert snapshot.interrupted == 4 and sum(snapshot.discarded.values()) == 0
    assert pickle.loads(pickle.dumps(snapshot)) == snapshot


numbers = st.integers(0, 100)
snapshots = st.builds(
    LedgerSnapshot,
    generated=numbers,
    trained=numbers,
    buffered=numbers,
    interrupted=numbers,
    pending=numbers,
    discarded=st.dictionaries(st.sampled_from(["stale", "failed", "filtered"]), numbers),
)


@given(snapshots, snapshots, snapshots)
def test_merging_adds_up_in_any_order(a, b, c):
    assert (a + b) + c == a + (b + c)
    assert a + b == b + a
    assert (a + b).error == a.error + b.error


moves = st.lists(st.tuples(st.sampled_from(["generate", "end", "drop", "train"]), numbers))


@given(moves)
def test_one_ledger_is_exact_after_any_events(events):
    ledger = TokenLedger()
    for what, number in events:
        try:
            match what:
                case "generate":
                    ledger.generated(number)
                case "end":
                    ledger.move(number, "interrupted", "pending")
                case "drop":
                    ledger.discard(number, "interrupted", "stale")
                case "train":
                    ledger.move(number, "pending", "trained")
        except LedgerError:
            pass
        snapshot = ledger.snapshot()
        assert snapshot.error == 0
        assert min(snapshot.pending, snapshot.interrupted, snapshot.trained) >= 0
