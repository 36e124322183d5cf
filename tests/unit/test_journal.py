"""The journal, and runs that are killed between checkpoints (data/journal.py, data/replay.py)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections import Counter

import pyarrow.fs
import pytest
import ray.train
from ray.exceptions import ActorUnavailableError

from ray_apr.config import JournalConfig, RolloutConfig
from ray_apr.core.exceptions import ConfigError, EngineUnavailableError
from ray_apr.core.sample import FinishReason, Prompt, Sample, Segment
from ray_apr.data.journal import Journal, JournalFolder
from ray_apr.data.replay import Epoch, replay
from ray_apr.data.resumption import Begin, Counters, RolloutProgress
from ray_apr.data.saved_samples import groups_of
from ray_apr.data.store import opened
from ray_apr.run.journals import header_of, journal_of, with_journal
from ray_apr.run.resume import find_begin
from ray_apr.scheduling.order import prompt_position
from ray_apr.scheduling.orders import OrderKind
from ray_apr.scheduling.scheduler import TurnRules
from tests.fakes import ScriptedEngine
from tests.rollout_run import PROMPTS, Run, Scorer, until, without_ray
from tests.run_specs import run_spec
from tests.unit.test_capture import samples_of, settings_of

HEADER = {"seed": 0, "num_prompts": 3, "sampled": {}, "step_size": 4}
LENGTHS = {
    f"e{e}-{o}-{i}": 1 + (7 * e + 3 * o + i) % 9
    for e in range(20)
    for o in range(3)
    for i in range(2)
}
PROMPT = Prompt(prompt_id="e0-0", token_ids=(1, 2))


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    without_ray(monkeypatch)


@pytest.fixture
def folder(tmp_path):
    return JournalFolder.of(str(tmp_path / "journal"))


FULL = OSError(28, "No space left on device")


@pytest.fixture
def refusals(monkeypatch):
    """Errors that writing to a journal raises, by who writes; none at first."""
    append, errors = JournalFolder.append, {}

    def try_to(self, epoch, writer, *rest):
        if writer in errors:
            raise errors[writer]
        append(self, epoch, writer, *rest)

    monkeypatch.setattr(JournalFolder, "append", try_to)
    return errors


def segment(version, first, num_tokens, *, is_generated=True):
    ids = tuple(range(first, first + num_tokens))
    return Segment(
        policy_version=version, token_ids=ids, is_generated=is_generated,
        logprobs=tuple(-i / 7 if is_generated else 0.0 for i in ids),
    )  # fmt: skip


def sample_of(*segments, name="e0-0-0", **fields):
    return Sample(
        sample_id=name, group_id=name.rpartition("-")[0], prompt=PROMPT, max_response_tokens=64,
        segments=segments, **fields,
    )  # fmt: skip


# -- files -----------------------------------------------------------------------------------------


async def written(folder, *changes, **options):
    """Write what happens to two siblings; returns what a run goes on with."""
    journal = Journal(folder, "worker", header=HEADER, state=_state, **options)
    other = sample_of(name="e0-0-1")
    for sample in changes:
        journal.note_samples((sample, other), sample)
        await journal.flush()
    return replayed(folder, trainer_lives=True)


def _state():
    return {"counters": dataclasses.asdict(Counters()), "position": 1}


def replayed(folder, begin=None, *, trainer_lives=False, header=HEADER):
    begin = begin or Begin(rollout=None)
    epochs = [
        Epoch(tuple(folder.frames(n, "worker")), tuple(folder.frames(n, "buffer")))
        for n in folder.epochs()
        if n >= begin.epoch
    ]
    begin = replay(begin, epochs, header, trainer_lives=trainer_lives)
    return dataclasses.replace(begin, epoch=max(folder.epochs(), default=-1) + 1)


def only(begin):
    live, handed_over = groups_of(begin.samples, lambda _: PROMPT)
    assert not handed_over
    ((one, other),) = live
    assert other == sample_of(name="e0-0-1"), "siblings without a token are there, too"
    return one


async def test_a_sample_comes_back_as_it_was_whatever_its_pieces(folder):
    begun = sample_of(segment(0, 10, 3), num_interruptions=1)
    longer = sample_of(segment(0, 10, 3), segment(1, 20, 2), num_interruptions=2)
    merged = sample_of(segment(0, 10, 3), segment(1, 20, 6), num_interruptions=3)
    ended = dataclasses.replace(
        merged, finish_reason=FinishReason.STOP, response_text="x", reward=0.5
    )
    assert only(await written(folder, begun, longer, merged, ended)) == ended
    sizes = [frame.rows["token_ids"][0].values for frame in folder.frames(0, "worker")]
    assert [len(ids) for ids in sizes] == [3, 2, 4, 0], "each token is written once"


async def test_a_sample_that_began_anew_has_its_new_tokens_alone(folder):
    last = sample_of(segment(1, 70, 2), num_interruptions=2)
    assert only(await written(folder, sample_of(segment(0, 10, 3)), sample_of(), last)) == last


async def test_what_an_environment_said_first_gets_the_version_of_the_first_token(folder):
    said = sample_of(segment(0, 5, 2, is_generated=False), environment_state={"at": 1})
    went_on = sample_of(segment(3, 5, 2, is_generated=False), segment(3, 10, 1))
    assert only(await written(folder, said, went_on)) == went_on


async def test_support_of_tokens_is_kept(folder):
    first = dataclasses.replace(segment(0, 10, 2), support=(b"aaaa", b"bbbb"))
    second = dataclasses.replace(segment(1, 12, 1), support=(b"cccc",))
    whole = sample_of(first, segment(1, 30, 2, is_generated=False), second)
    found = only(await written(folder, sample_of(first), whole))
    assert found.support == whole.support and found.segments == whole.segments


@pytest.mark.parametrize("cut", [1, 7, 40, 2000])
async def test_a_frame_that_was_cut_off_is_left_out(folder, tmp_path, cut):
    await written(folder, sample_of(segment(0, 10, 3)), sample_of(segment(0, 10, 9)))
    (file,) = (tmp_path / "journal").iterdir()
    data = file.read_bytes()
    file.write_bytes(data[:-cut])
    assert only(replayed(folder, trainer_lives=True)) == sample_of(segment(0, 10, 3))


class Store(pyarrow.fs.SubTreeFileSystem):
    """Its files cannot grow."""

    def open_append_stream(self, *_, **__):
        raise NotImplementedError("an object store")


@pytest.mark.parametrize("damage", ["is lost", "is cut off"])
async def test_what_follows_a_hole_in_the_files_of_a_store_is_left_out(tmp_path, damage):
    """known fault: frames behind one that was not there were taken for what followed the last."""
    folder = JournalFolder(Store(str(tmp_path), pyarrow.fs.LocalFileSystem()), "journal")
    changes = [sample_of(segment(0, 10, n)) for n in (3, 6, 9)]
    await written(folder, *changes)
    _, second, _ = sorted((tmp_path / "journal").iterdir())
    if damage == "is lost":
        second.unlink()
    else:
        second.write_bytes(second.read_bytes()[:-1])
    assert only(replayed(folder, trainer_lives=True)) == changes[0]


async def test_where_files_cannot_grow_each_frame_is_a_file(tmp_path):
    store = Store(str(tmp_path), pyarrow.fs.LocalFileSystem())
    folder = JournalFolder(store, "journal")
    longer = sample_of(segment(0, 10, 3), segment(1, 20, 2))
    assert only(await written(folder, sample_of(segment(0, 10, 3)), longer)) == longer
    assert len(list((tmp_path / "journal").iterdir())) == 2
    folder.drop_before(1)
    assert not folder.epochs()


async def test_a_journal_that_cannot_be_written_stops_until_the_next_epoch(
    folder, refusals, caplog
):
    journal = Journal(folder, "worker", header=HEADER, state=_state)
    group = (sample_of(segment(0, 10, 3)), sample_of(name="e0-0-1"))
    refusals["worker"] = FULL
    journal.note_samples(group, group[0])
    await journal.flush()
    refusals.clear()
    journal.note_samples(group, sample_of(segment(0, 10, 5)))
    await journal.flush()
    assert not list(folder.frames(0, "worker")), "a file with a hole says nothing true"
    assert folder.epochs() == folder.broken_epochs() == [0]
    assert caplog.text.count("stops until the next checkpoint") == 1
    journal.begin_epoch(1)
    journal.note_samples(group, sample_of(segment(0, 10, 7)))
    await journal.flush()
    assert folder.epochs() == [0, 1] and folder.broken_epochs() == [0]
    folder.drop_before(1)
    assert folder.epochs() == [1]


class StorageError(Exception):
    """Of a client of an object store, which is no `OSError`."""


@pytest.mark.parametrize("of_storage", [True, False])
async def test_whatever_error_lost_a_frame_its_file_is_not_taken_for_whole(
    folder, refusals, caplog, of_storage
):
    """known fault: what was not an `OSError` lost a frame, and nobody who read the file knew."""
    journal = Journal(folder, "worker", header=HEADER, state=_state)
    group = (sample_of(segment(0, 10, 3)), sample_of(name="e0-0-1"))
    journal.note_samples(group, group[0])
    await journal.flush()
    if of_storage:
        refusals["worker"] = StorageError("503")
    state = {} if of_storage else {"lock": threading.Lock()}
    journal.note_samples(group, sample_of(segment(0, 10, 5), environment_state=state))
    await journal.flush()
    refusals.clear()
    journal.note_samples(group, sample_of(segment(0, 10, 9)))
    await journal.flush()
    assert folder.broken_epochs() == [0] and len(list(folder.frames(0, "worker"))) == 1
    said = "StorageError: 503" if of_storage else "TypeError: cannot pickle"
    assert said in caplog.text
    journal.begin_epoch(1)
    await journal.flush()
    assert folder.epochs() == [0, 1] and folder.broken_epochs() == [0]


async def test_a_journal_of_other_settings_is_not_used(folder):
    found = await written(folder, sample_of(segment(0, 10, 3)))
    assert found.samples.num_rows == 2
    begin = Begin(rollout=None)
    found = replayed(folder, begin, header=HEADER | {"seed": 1})
    assert found == dataclasses.replace(begin, epoch=1)


# -- runs ------------------------------------------------------------------------------------------


class Killed:
    """A run that is killed now and then, with what it has on disk."""

    def __init__(self, folder, *, trainer_lives, partial, **settings) -> None:
        self.folder, self.trainer_lives = folder, trainer_lives
        self.partial, self.settings = partial, settings
        self.begin = self.checkpoint = self.began = Begin(rollout=None)
        """Where it goes on, its last checkpoint, and where its trainer began."""
        self.step = 0
        self.batches: dict[int, set[str]] = {}
        """Groups of each step, as it was trained last."""
        self.trained: list[Sample] = []
        self.engine = ScriptedEngine(LENGTHS, auto=1)
        self.num_lost = 0

    async def __aenter__(self):
        begin = self.begin
        given = settings_of(begin) if begin.rollout is not None else {}
        journal = {
            "journal": self.folder, "header": HEADER, "replayed": begin.replayed,
            "epoch": begin.epoch,
        }  # fmt: skip
        self.run = Run(
            self.engine, policy_version=begin.of_engines, journal=journal, before=begin.before,
            **given, **self.partial, **self.settings,
        )  # fmt: skip
        await self.run.worker.start()
        return self

    async def train(self, num_steps) -> None:
        for _ in range(num_steps):
            samples = await self.run.step(self.step)
            self.trained += samples
            groups = {sample.group_id for sample in samples}
            assert self.batches.get(self.step, groups) == groups, "trained again, it is the same"
            self.batches[self.step] = groups
            self.step += 1
            await self.run.sync(self.step)

    async def write(self) -> None:
        """Have all that the worker has noted in its file, and no more of it on the way there; it
        notes more until the batch ahead and the buffer behind it are full."""
        journal = self.run.worker._notes._journal
        await journal.flush()
        while journal._in_file.locked() or journal._pending.samples:
            await journal.flush()

    async def save(self) -> None:
        taken = await self.run.worker.capture()
        progress = RolloutProgress.of(
            taken.summary, taken.stats, seed=0, before=taken.before, state=taken.state,
            epoch=taken.epoch,
        )  # fmt: skip
        self.checkpoint = Begin(
            step=self.step, policy_version=self.step, rollout=progress, samples=taken.samples[0],
            before=progress.counters, epoch=taken.epoch,
        )  # fmt: skip
        self.began = self.checkpoint

    async def __aexit__(self, *error) -> None:
        """Kill it: nothing of it is told that it ends."""
        await _cancelled(self.run.worker._main)
        for journal in (self.run.worker._notes._journal, self.run.buffer._notes._journal):
            await _cancelled(journal._writing)
            async with journal._in_file:  # a thread that writes dies with its process
                journal._folder = None
        since = self.began if self.trainer_lives else self.checkpoint
        begin = replayed(self.folder, since, trainer_lives=self.trainer_lives)
        before, self.num_lost = begin.before.lose(0, begin.num_kept)
        self.begin = dataclasses.replace(begin, before=before)
        if not self.trainer_lives:
            self.began, self.step = self.begin, begin.step
            await self.engine.abort(None)
            self.engine = ScriptedEngine(LENGTHS, auto=1, policy_version=self.step)


async def end_step(buffer, step) -> None:
    while await buffer.ack(step, step + 1) is None:  # noqa: ASYNC110  (as the trainer does)
        await asyncio.sleep(0)


async def _cancelled(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


PARTIAL = [
    {"max_staleness": 4, "oversampling_factor": 3.0},
    {"max_staleness": 2, "oversampling_factor": 2.0, "interrupt": "batch_full"},
    {"max_staleness": 2, "oversampling_factor": 2.0, "on_stale": "wait"},
    {"max_staleness": 0, "oversampling_factor": 1.0, "interrupt": "never"},
    {"max_staleness": 1, "oversampling_factor": 2.0, "interrupt": "batch_full",
     "after_interrupt": "restart"},
]  # fmt: skip


@pytest.mark.parametrize("trainer_lives", [True, False])
@pytest.mark.parametrize("saves", [0, 2])
@pytest.mark.parametrize("partial", PARTIAL)
async def test_a_run_that_is_killed_between_checkpoints_loses_nothing(
    folder, partial, saves, trainer_lives
):
    killed = Killed(folder, trainer_lives=trainer_lives, partial=partial)
    for round_ in range(6):
        async with killed as run:
            await run.train(2 if trainer_lives or round_ < 5 else 14)
            if saves and round_ % saves == 1:
                await run.save()
                await run.train(1)
            for _ in range(round_):
                await asyncio.sleep(0)
            await run.write()
            made = {
                live.sample_id: live.sample
                for group in run.run.worker._scheduler.live.groups
                for live in group.members
                if live.sample.num_generated
            }
        assert killed.num_lost == 0
        kept = {s.sample_id: s for s in samples_of(killed.begin)}
        for name, sample in made.items():
            assert kept[name].segments == sample.segments
    trained = Counter(group for groups in killed.batches.values() for group in groups)
    assert set(trained.values()) == {1} and len(killed.batches) >= 9
    begin = killed.begin
    gone = {row["group_id"] for row in begin.replayed.dropped}
    done = {prompt_position(group, len(PROMPTS)) for group in trained}
    if trainer_lives and not saves:
        lost = set(range(begin.rollout.position)) - done - set(begin.rollout.pending)
        assert lost <= {prompt_position(group, len(PROMPTS)) for group in gone}


@pytest.mark.parametrize("saves", [False, True])
async def test_a_prompt_that_goes_on_knows_how_often_it_was_stopped(folder, saves):
    """Its id has only the sum of its tries."""
    partial = {**PARTIAL[4], "max_staleness": 0}
    killed = Killed(folder, trainer_lives=True, partial=partial)
    async with killed as run:
        scheduler = run.run.worker._scheduler
        while not scheduler.state().num_stops:
            await run.train(1)
        killed.engine._auto = 0  # nothing ends any more
        if saves:
            await run.save()
        await run.write()
        num_stops = scheduler.state().num_stops
    assert num_stops and killed.begin.rollout.num_stops == num_stops
    assert not saves or killed.checkpoint.rollout.num_stops == num_stops
    async with killed as run:
        scheduler = run.run.worker._scheduler
        assert scheduler.state().num_stops == num_stops


@pytest.mark.parametrize("trainer_lives", [True, False])
async def test_what_was_not_written_is_lost_and_counted(folder, monkeypatch, trainer_lives):
    append = JournalFolder.append

    def append_slowly(*args):
        time.sleep(0.005)
        append(*args)

    monkeypatch.setattr(JournalFolder, "append", append_slowly)
    killed = Killed(folder, trainer_lives=trainer_lives, partial=PARTIAL[0])
    for _ in range(5):
        async with killed as run:
            await run.train(2)
            await asyncio.sleep(0.01)
        assert killed.num_lost >= 0
        before, kept = killed.begin.before, killed.begin.num_kept
        placed = before.tokens_trained + sum(before.tokens_discarded.values()) + kept
        assert before.tokens_generated == placed
    async with killed as run:
        await run.train(4)
        summary, stats = await run.run.worker.stop(), await run.run.buffer.stats()
        ledger = run.run.worker._before.ledger + summary.ledger + stats.ledger
        assert ledger.error == 0
        if trainer_lives:
            made = sum(status.tokens_generated for status in summary.engines)
            assert summary.ledger.generated == made
            assert run.engine.tokens_generated == ledger.generated


async def test_a_death_that_follows_a_capture_at_once_finds_the_step_under_way(folder):
    """known fault: the epochs of both were begun in memory alone. The next buffer had no grant, and
    the next worker counted all tokens of the engines as lost."""
    killed = Killed(folder, trainer_lives=True, partial=PARTIAL[0])
    async with killed as run:
        await run.train(2)
        await run.run.buffer.grant(2, 2)
        while (ticket := await run.run.buffer.take(0, 1)) is None:
            pass
        await run.save()
    assert killed.num_lost == 0
    assert killed.begin.replayed.granted == (2, 2)
    assert killed.begin.replayed.received == {"engine-0": killed.engine.tokens_generated}
    async with killed as run:
        await end_step(run.run.buffer, 2)
        stats = await run.run.buffer.stats()
        groups = [samples[0].group_id for samples in opened(ticket.refs)]
        assert stats.trained_samples == 4 and not set(groups) & set(stats.held_groups)
        summary = await run.run.worker.stop()
        ledger = run.run.worker._before.ledger + summary.ledger + stats.ledger
        assert (ledger.error, ledger.discarded["lost"]) == (0, 0)


async def test_a_buffer_that_dies_gives_the_batch_again_that_it_gave_ahead(folder):
    killed = Killed(folder, trainer_lives=True, partial=PARTIAL[0])
    async with killed as run:
        await run.train(2)
        buffer = run.run.buffer
        await buffer.grant(2, 2)
        taken = []
        for last_step in (1, 2):
            while (ticket := await buffer.take(0, last_step)) is None:
                pass
            taken.append([samples[0].group_id for samples in opened(ticket.refs)])
        await run.write()
    assert killed.begin.replayed.granted == (2, 2)
    assert [list(killed.begin.replayed.plan[step]) for step in (2, 3)] == taken
    async with killed as run:
        buffer = run.run.buffer
        await end_step(buffer, 2)
        while (ticket := await buffer.take(0, 2)) is None:  # another rank, say
            pass
        assert [samples[0].group_id for samples in opened(ticket.refs)] == taken[1]
        assert not set(taken[0]) & set((await buffer.stats()).held_groups)


async def with_steps_to_repeat(folder, partial, *, saved_at) -> Killed:
    """A run whose trainer has died three steps after its checkpoint."""
    killed = Killed(folder, trainer_lives=False, partial=partial)
    async with killed as run:
        await run.train(saved_at)
        await run.save()
        await run.train(3)
        await run.write()
    return killed


@pytest.mark.parametrize(
    ("partial", "num_steps", "has_frames"),
    [
        (PARTIAL[0], 0, False),
        (PARTIAL[0], 4, True),
        (PARTIAL[2], 1, True),
        (PARTIAL[4], 0, False),
        (PARTIAL[4], 1, True),
    ],
)
async def test_a_side_that_dies_beside_a_trainer_that_repeats_steps_goes_on_with_that_one(
    folder, partial, num_steps, has_frames
):
    """known fault: the next one took version, grant, last step and tokens of the trainer before,
    which had gone further."""
    killed = await with_steps_to_repeat(folder, partial, saved_at=2)
    assert (killed.step, killed.begin.policy_version) == (2, 2)
    assert len(killed.begin.replayed.plan) in (3, 4), "with the one that was chosen ahead, if any"
    killed.trainer_lives = True
    async with killed as run:
        if has_frames:
            await run.train(num_steps)
            await run.write()
    begin = killed.begin
    assert begin.of_engines == killed.step == 2 + num_steps
    assert begin.replayed.granted in (None, (killed.step, killed.step))
    assert begin.replayed.trained is None or begin.replayed.trained[0] == killed.step - 1
    assert set(begin.replayed.plan) >= {2, 3, 4} - set(range(killed.step))
    assert begin.before.samples_trained == killed.step * 4
    newest = max(max(sample.token_versions, default=0) for sample in samples_of(begin))
    assert newest <= max(killed.step, 5) and begin.replayed.goes_on_at >= newest
    async with killed as run:
        await run.train(12 - killed.step)
        await run.write()
        summary, stats = await run.run.worker.stop(), await run.run.buffer.stats()
        ledger = run.run.worker._before.ledger + summary.ledger + stats.ledger
        assert ledger.error == 0
        for sample in killed.trained:
            assert list(sample.token_versions) == sorted(sample.token_versions)
    trained = Counter(group for groups in killed.batches.values() for group in groups)
    assert set(trained.values()) == {1} and len(killed.batches) == 12


@pytest.mark.parametrize("trainer_lives", [True, False])
@pytest.mark.parametrize("partial", [PARTIAL[0], PARTIAL[2]])
async def test_a_checkpoint_among_steps_that_are_trained_again_keeps_their_batches(
    folder, partial, trainer_lives
):
    """known fault: who began with it did not know the batches of the steps after it, and had groups
    of them that are newer than the trainer. The next buffer failed at these, or the tokens were
    counted as lost."""
    killed = await with_steps_to_repeat(folder, partial, saved_at=1)
    assert set(killed.begin.replayed.plan) in ({1, 2, 3}, {1, 2, 3, 4})
    killed.trainer_lives = trainer_lives
    async with killed as run:
        await run.train(1)
        await run.save()
    assert (killed.step, killed.num_lost) == (2, 0)
    assert set(killed.begin.replayed.plan) in ({2, 3}, {2, 3, 4})
    assert killed.begin.replayed.goes_on_at in (3, 4, 5), "its samples are newer than the trainer"
    async with killed as run:
        await run.train(6)
        summary, stats = await run.run.worker.stop(), await run.run.buffer.stats()
        ledger = run.run.worker._before.ledger + summary.ledger + stats.ledger
        assert (ledger.error, ledger.discarded["lost"]) == (0, 0)
        for sample in killed.trained:
            assert list(sample.token_versions) == sorted(sample.token_versions)
    trained = Counter(group for groups in killed.batches.values() for group in groups)
    assert set(trained.values()) == {1} and len(killed.batches) == 8


async def test_samples_newer_than_their_checkpoint_begin_anew_where_the_journal_is_of_no_use(
    folder,
):
    """known fault: the buffer failed at groups that are newer than the trainer. Such a checkpoint
    is taken while steps are trained again; other settings, or another run, have no use for the
    journal which says with what."""
    killed = Killed(folder, trainer_lives=False, partial=PARTIAL[0])
    async with killed as run:
        await run.train(4)
        await run.write()
    async with killed as run:
        await run.train(1)
        await run.save()
    newest = [max(s.token_versions, default=0) for s in samples_of(killed.checkpoint)]
    assert max(newest) == 4 and killed.checkpoint.policy_version == 1
    for begin in (
        replayed(folder, killed.checkpoint, header=HEADER | {"step_size": 8}),
        replay(killed.checkpoint, (), {}, trainer_lives=False),
    ):
        kept = {s.sample_id: s.num_tokens for s in samples_of(begin)}
        assert [kept[s.sample_id] for s in samples_of(killed.checkpoint)] == [
            0 if version > 1 else s.num_tokens
            for s, version in zip(samples_of(killed.checkpoint), newest, strict=True)
        ]
        assert begin.replayed.goes_on_at == begin.of_engines == 1
        assert begin.rollout == killed.checkpoint.rollout


@pytest.mark.parametrize("partial", [PARTIAL[0], PARTIAL[4]])
async def test_engines_say_themselves_which_version_they_have(folder, partial):
    """known fault: after two deaths, each right after a sync, the journal knew the first of the
    versions of its tokens alone; the third worker waited for weights that no trainer would send,
    and the trainer for its batch."""
    killed = Killed(folder, trainer_lives=True, partial=partial)
    async with killed as run:
        await run.train(3)
        await run.write()
    assert killed.begin.of_engines == killed.engine.policy_version == 3
    replayed = dataclasses.replace(killed.begin.replayed, policy_version=1, goes_on_at=2)
    killed.begin = dataclasses.replace(killed.begin, replayed=replayed)
    async with killed as run:
        assert run.run.worker._scheduler.policy_version == 3
        await run.train(3)
        summary, stats = await run.run.worker.stop(), await run.run.buffer.stats()
        assert (run.run.worker._before.ledger + summary.ledger + stats.ledger).error == 0
        for sample in killed.trained:
            assert list(sample.token_versions) == sorted(sample.token_versions)


async def test_what_was_counted_between_two_tries_of_a_checkpoint_counts_once(folder):
    """The buffer had begun the epoch, and the worker had not heard of it."""
    killed = Killed(folder, trainer_lives=False, partial=PARTIAL[0])
    async with killed as run:
        held, answers = run.run.buffer.held, []

        async def cut_off(epoch):
            answers.append((epoch, await held(epoch)))
            if len(answers) == 1:
                raise ActorUnavailableError("connection reset", None)
            return answers[-1][1]

        run.run.buffer.held = cut_off
        with pytest.raises(ActorUnavailableError):
            await run.save()
        await run.train(2)
        await run.save()
        await run.train(1)
        await run.write()
    assert [epoch for epoch, _ in answers] == [1, 2]
    for checkpoint in (Begin(rollout=None), killed.checkpoint):
        begin = replayed(folder, checkpoint, trainer_lives=True)
        assert begin.before.samples_trained == 12
        assert begin.before.lose(0, begin.num_kept)[1] == 0


@pytest.mark.parametrize("full", [("worker",), ("buffer",), ("worker", "buffer")])
async def test_a_run_goes_on_with_a_checkpoint_and_a_journal_that_broke_off(folder, refusals, full):
    killed = Killed(folder, trainer_lives=False, partial=PARTIAL[0])
    async with killed as run:
        await run.train(3)
        await run.write()
        refusals |= dict.fromkeys(full, FULL)
        await run.train(3)
    refusals.clear()
    assert killed.num_lost >= 0
    killed.batches = {step: groups for step, groups in killed.batches.items() if step < 3}
    async with killed as run:
        await run.train(6)
        summary, stats = await run.run.worker.stop(), await run.run.buffer.stats()
        assert (run.run.worker._before.ledger + summary.ledger + stats.ledger).error == 0
    trained = Counter(group for groups in killed.batches.values() for group in groups)
    assert set(trained.values()) == {1}


@pytest.mark.parametrize("partial", [PARTIAL[0], PARTIAL[1], PARTIAL[3]])
async def test_what_a_run_gave_up_does_not_come_back_when_it_goes_on_once_more(
    folder, refusals, partial
):
    """known fault: once its trainer had come as far as their versions again, with other batches,
    the next run had tokens that the weights before had made."""
    killed = Killed(folder, trainer_lives=False, partial=partial)
    async with killed as run:
        await run.train(3)
        await run.write()
        refusals["buffer"] = FULL
        await run.train(3)
        await run.write()
    refusals.clear()
    killed.batches = {s: g for s, g in killed.batches.items() if s in killed.begin.replayed.plan}
    given_up = {s.sample_id for s in samples_of(killed.begin) if not s.num_tokens}
    reaches = len(killed.begin.replayed.plan)
    killed.engine._auto = 0  # no token comes any more
    async with killed as run:
        await run.train(reaches)
        await run.run.buffer.grant(reaches, reaches)
        await run.write()
    assert given_up and len(killed.begin.replayed.plan) > reaches, "it comes farther by a step"
    assert not [
        s.sample_id for s in samples_of(killed.begin) if s.num_tokens and s.sample_id in given_up
    ]


async def test_tokens_of_versions_that_do_not_come_again_are_given_up(folder, tmp_path):
    killed = Killed(folder, trainer_lives=False, partial=PARTIAL[0])
    async with killed as run:
        await run.train(3)
        await run.write()
    for file in (tmp_path / "journal").glob("*-buffer*"):
        file.unlink()
    begin = replayed(folder)
    versions = [v for s in samples_of(begin) for v in s.token_versions]
    assert begin.samples.num_rows and set(versions) == {0}
    assert begin.replayed.goes_on_at == 0 and not begin.replayed.plan


async def test_turns_and_states_of_environments_are_kept(folder, monkeypatch):
    from ray_apr.core.user import Step
    from ray_apr.rollout import sessions as sessions_module

    monkeypatch.setattr(
        sessions_module, "encode_step", lambda tokenizer, sample, step: (5000 + sample.num_tokens,)
    )

    class Environment(Scorer):
        async def step(self, sample):
            if sample.num_turns == 2:
                await asyncio.sleep(3600)
            return Step(done=False, text="go on", state={"turns": sample.num_turns})

    engine = ScriptedEngine(auto=1, default_length=9, turn_length=3)
    killed = Killed(
        folder, trainer_lives=False, partial=PARTIAL[0], turns=TurnRules(max_turns=3),
        scorer=Environment(),
    )  # fmt: skip
    killed.engine = engine
    async with killed as run:
        await until(lambda: run.run.worker._scheduler.counts().stepping >= 4)
        await run.write()
    asked = [sample for sample in samples_of(killed.begin) if sample.awaits_step]
    assert len(asked) >= 4
    for sample in asked:
        assert (sample.environment_state, sample.num_turns) == ({"turns": 1}, 2)
        assert [len(part.token_ids) for part in sample.segments] == [3, 1, 3]


async def test_a_sample_that_begins_anew_while_it_waits_for_an_engine_is_noted(folder, monkeypatch):
    """known fault: its new tokens were written behind those of its dead try."""
    from ray_apr.core.user import Step
    from ray_apr.rollout import sessions as sessions_module

    monkeypatch.setattr(sessions_module, "_RETRY_PAUSE_S", 0.3)

    class Environment(Scorer):
        async def step(self, sample):
            return Step(token_ids=(5000 + sample.num_tokens,))

    killed = Killed(
        folder, trainer_lives=True, scorer=Environment(), batch_size=2,
        turns=TurnRules(max_turns=9),
        partial={
            "interrupt": "batch_full", "after_interrupt": "restart", "max_staleness": 1,
            "oversampling_factor": 1.0, "max_live_batches": None,
        },
    )  # fmt: skip
    killed.engine = engine = ScriptedEngine(default_length=16, turn_length=4)
    async with killed as run:
        await until(lambda: len(engine.running) == 2)
        name = engine.running[0].partition("#")[0]
        of_it = lambda: [call for call in engine.running if call.startswith(f"{name}#")]  # noqa: E731
        engine.fail[name] = [
            EngineUnavailableError("its engine is gone")
        ]  # that of its second turn
        engine.advance(4, of_it())
        await until(lambda: not engine.fail[name])
        engine.turn_length = 8  # drawn anew, its first turn is longer
        await run.run.sync(1)  # a version passes while it waits
        await until(lambda: bool(of_it()))
        engine.advance(8, of_it())
        groups = run.run.worker._scheduler.live.groups
        (live,) = [m for group in groups for m in group.members if m.sample_id == name]
        await until(lambda: live.sample.num_turns == 1 and live.sample.num_tokens == 9)
        await run.write()
    (kept,) = [sample for sample in samples_of(killed.begin) if sample.sample_id == name]
    assert [(s.policy_version, s.token_ids) for s in kept.segments] == [
        (s.policy_version, s.token_ids) for s in live.sample.segments
    ]


async def test_a_run_that_begins_again_gets_a_version_that_is_not_due_for_a_sync(folder):
    """known fault: it waited for that version, which its trainer never sent, and starved."""
    partial = {
        "max_staleness": 3, "oversampling_factor": 1.0, "sync_every": 2, "max_live_batches": 1.0,
    }  # fmt: skip
    killed = Killed(folder, trainer_lives=False, partial=partial)
    async with killed as run:
        run.engine._auto, run.engine.default_length = 0, 12
        run.engine.lengths.clear()
        await until(lambda: bool(run.engine.running))
        run.engine.advance(99)
        await run.run.step(0)
        await run.run.sync(1)  # all engines had died
        await until(lambda: bool(run.engine.running))
        run.engine.advance(3)
        await run.run.worker._sessions.abort(list(run.run.worker._scheduler.live.inflight.values()))
        await asyncio.sleep(0.1)
        await run.write()
    assert killed.begin.replayed.goes_on_at == 1 and list(killed.begin.replayed.plan) == [0]
    killed.engine = ScriptedEngine(default_length=12, auto=1)
    async with killed as run:
        assert await run.run.step(0)
        assert not run.run.worker._has_weights.is_set(), "a step that is not due for a sync"
        await run.run.buffer.grant(1, 1)
        ticket = None
        async with asyncio.timeout(10):
            while ticket is None:
                ticket = await run.run.buffer.take(0, 0)
        assert ticket.order.kind is OrderKind.SEND_WEIGHTS
        await run.run.sync(1)
        await until(lambda: bool(run.engine.calls))


def test_settings_of_a_journal_are_obeyed_or_refused():
    config = RolloutConfig(journal={"path": "/shared/journals"})
    assert config.journal.path == "/shared/journals"
    for wrong in ({"enabled": False, "path": "/x"}, {"path": ""}, {"enabled": 1}, {"where": "x"}):
        with pytest.raises(ConfigError, match=r"rollout\.journal"):
            RolloutConfig(journal=wrong)


async def test_a_part_without_a_journal_is_not_followed_by_the_epochs_of_the_part_before(tmp_path):
    """known fault: with a journal again, a run took what had followed a checkpoint that was never
    durable for what followed one of the part without a journal, of the same number."""
    run = ray.train.RunConfig(name="run", storage_path=str(tmp_path))
    on = run_spec(run=run)
    off = run_spec(run=run, rollout=RolloutConfig(journal=JournalConfig(enabled=False)))
    header, state = header_of(on) | {"num_prompts": 3}, {"counters": dataclasses.asdict(Counters())}
    journal = Journal(journal_of(on), "buffer", 3, header=header, state=lambda: state)
    journal.note(granted=[8, 8])
    journal.begin_epoch(4)  # of a checkpoint that a kill kept from the list
    journal.note(batch=[12, ["e0-1"]])
    await journal.flush()
    assert with_journal(on, Begin(epoch=3), first=3).epoch == 5
    without = with_journal(off, Begin(epoch=3), first=3)
    saved = without.epoch + 1  # as `Notes.next_epoch` counts
    again = with_journal(on, Begin(epoch=saved), first=saved)
    assert again.replayed is None and again.epoch == saved


async def test_a_part_whose_journal_is_elsewhere_is_not_followed_by_what_others_left(tmp_path):
    """known fault: as without a journal, where `rollout.journal.path` was another one meanwhile."""
    run = ray.train.RunConfig(name="run", storage_path=str(tmp_path))
    first, other = (
        run_spec(run=run, rollout=RolloutConfig(journal=JournalConfig(path=str(tmp_path / name))))
        for name in ("first", "other")
    )
    header, state = header_of(first) | {"num_prompts": 3}, dataclasses.asdict(Counters())
    journal = Journal(
        journal_of(first), "buffer", 3, header=header, state=lambda: {"counters": state}
    )
    journal.note(granted=[8, 8])
    journal.begin_epoch(4)  # of a checkpoint that a kill kept from the list
    journal.note(batch=[12, ["e0-1"]])
    await journal.flush()
    resumed = Begin(epoch=3, is_resumed=True)
    assert with_journal(first, resumed, first=3).epoch == 5
    saved = with_journal(other, resumed, first=3).epoch + 1
    again = with_journal(first, Begin(epoch=saved, is_resumed=True), first=saved)
    assert again.replayed is None and again.epoch >= saved


async def noted(spec, **counted):
    """A run that noted a frame and was killed."""
    state = {"counters": dataclasses.asdict(Counters(**counted)), "position": 2}
    header = header_of(spec) | {"num_prompts": 3}
    journal = Journal(journal_of(spec), "worker", header=header, state=lambda: state)
    journal.note(admitted=[])
    await journal.flush()


async def test_a_new_run_is_not_followed_by_the_journal_of_another_one_of_its_name(tmp_path):
    """known fault: it wrote into these files, and went on with both runs' prompts and tokens."""
    run = ray.train.RunConfig(name="run", storage_path=str(tmp_path / "new"))
    elsewhere = RolloutConfig(journal=JournalConfig(path=str(tmp_path / "journals")))
    spec = run_spec(run=run, rollout=elsewhere)
    assert find_begin(spec) == Begin()
    await noted(spec, tokens_generated=9)
    with pytest.raises(ConfigError, match=r"'run': .*journals/run/journal has .* not in .*new/run"):
        find_begin(spec)
    spec.folder.mkdir(parents=True)
    (spec.folder / "metrics.jsonl").touch()
    assert find_begin(spec).before.tokens_generated == 9, "which is its own"


async def test_a_run_goes_on_with_its_journal_where_its_storage_has_nothing_else(
    tmp_path, monkeypatch
):
    """known fault: it began anew, in the files of the journal that its node had left."""
    monkeypatch.chdir(tmp_path)  # the node's own folder has nothing either
    run = ray.train.RunConfig(name="run", storage_path=f"file://{tmp_path}/there")
    spec = run_spec(run=run)
    assert find_begin(spec) == Begin()
    await noted(spec, tokens_generated=9)
    begin = find_begin(spec)
    assert begin.is_resumed and begin.epoch == 1 and begin.before.tokens_generated == 9
    assert begin.rollout is not None and begin.rollout.position == 2
