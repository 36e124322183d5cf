"""Going on with a run: its prompts, its figures, its folder, what is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
import ray.train

from ray_apr.config import EvaluationConfig, LoRAConfig, RolloutConfig, TrainConfig
from ray_apr.core.exceptions import ConfigError, ResourceError
from ray_apr.core.ledger import LedgerSnapshot
from ray_apr.core.sample import FinishReason, Prompt, Sample, Segment
from ray_apr.core.user import Environment, Step
from ray_apr.data.prompts import TOKEN_IDS, PromptSource
from ray_apr.data.resumption import (
    FORMAT,
    LIST_FILE,
    PROGRESS_FILE,
    ROLLOUT_FILE,
    SAMPLES_FILE,
    Begin,
    Counters,
    RolloutProgress,
    sampled_with,
)
from ray_apr.data.saved_samples import samples_table, write_samples
from ray_apr.run import resume
from ray_apr.run.folder import LOCK_FILE
from ray_apr.run.recorder import RunRecorder
from ray_apr.run.resume import (
    find_begin,
    hold_folder,
    kept_checkpoints,
    last_step,
    remove_end,
    resume_folder,
    resume_line,
)
from ray_apr.scheduling.intake import SchedulerState
from ray_apr.scheduling.order import prompt_order
from tests.run_specs import run_spec

BEFORE = Counters(
    samples_trained=8, tokens_trained=50, samples_interrupted=2, samples_resumed=1,
    tokens_generated=90, tokens_discarded={"stale": 10},
)  # fmt: skip
OF_FORMAT_0 = ("seed", "num_prompts", "position", "pending", "counters")
SAMPLED = RolloutConfig(group_size=2, max_response_tokens=16)
PROMPT = Prompt(prompt_id="e0-1", token_ids=(1,))
TOKENS = Segment(policy_version=1, token_ids=(7, 8), logprobs=(-0.5, -1.0))
GROUP = tuple(
    Sample(sample_id=f"e0-1-{i}", group_id="e0-1", prompt=PROMPT, max_response_tokens=16,
           segments=(TOKENS,))
    for i in range(2)
)  # fmt: skip
PROGRESS = RolloutProgress(seed=0, num_prompts=4, position=6, pending=(1, 5), counters=BEFORE)


# -- prompts ---------------------------------------------------------------------------------------


def test_prompts_that_were_under_way_come_first_and_then_those_that_had_not_come():
    table = pa.table({TOKEN_IDS: [[i] for i in range(4)]})
    whole = PromptSource([table], seed=3)
    ids = [whole.next().prompt_id for _ in range(8)]
    source = PromptSource([table], seed=3, position=6, pending=(1, 5))
    assert source.pending == (1, 5)
    assert [source.next().prompt_id for _ in range(4)] == [ids[1], ids[5], ids[6], ids[7]]
    assert (source.position, source.pending) == (8, ())
    again = PromptSource([table], seed=3, position=5).next()
    assert again.token_ids == (prompt_order(4, seed=3, epoch=1)[1],)


def test_a_checkpoint_notes_what_worker_and_buffer_hold():
    summary = SimpleNamespace(
        num_prompts=4, prompts_position=9, pending_prompts=(3, 8), samples_interrupted=1,
        samples_resumed=1, ledger=LedgerSnapshot(generated=70, discarded={"failed": 5}),
        sampled={"group_size": 2},
    )  # fmt: skip
    stats = SimpleNamespace(
        held_groups=("e1-1", "e2-0~1"), trained_samples=4,
        ledger=LedgerSnapshot(trained=30, discarded={"stale": 6}),
    )  # fmt: skip
    state = SchedulerState(
        retries=("e2-0~1",), num_long_retries=1, num_stops={"e2-0~1": 1}, num_owed=2
    )
    progress = RolloutProgress.of(summary, stats, seed=2, before=BEFORE, state=state)
    assert progress.pending == (3, 5, 8)
    assert (progress.seed, progress.num_prompts, progress.position) == (2, 4, 9)
    assert progress.counters == Counters(
        samples_trained=12, tokens_trained=80, samples_interrupted=3, samples_resumed=2,
        tokens_generated=160, tokens_discarded={"failed": 5, "stale": 16},
    )  # fmt: skip
    assert RolloutProgress.from_values(json.loads(progress.to_json())) == progress


# -- figures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("generated", "lost"), [(0, 30), (90, 30), (200, 140)])
def test_what_was_neither_trained_nor_discarded_is_lost(generated, lost):
    after, num_lost = BEFORE.lose(generated)
    assert num_lost == lost and after.tokens_discarded == {"stale": 10, "lost": lost}
    assert after.tokens_generated == after.tokens_trained + 10 + lost
    assert after.lose(0) == (after, 0) or after.lose(0)[1] == 0


async def test_the_rows_of_a_resumed_run_go_on(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1, "cut o')
    recorder = RunRecorder(str(tmp_path), 0.0)
    await recorder.record("status", {"tokens_generated": 95, "inflight": 3})
    await recorder.record("step", {"step": 1})
    rows, _ = await recorder.follow(1, 1.0)
    assert rows == [{"step": 1, "tokens_generated": 95, "inflight": 3}]
    assert await recorder.num_steps() == 2
    await recorder.close()
    assert [row["step"] for row in read(tmp_path, "metrics.jsonl")] == [0, 1]


async def test_the_end_of_a_recorder_ends_the_calls_of_those_who_follow(tmp_path):
    """known fault: Ray said at a run's end that such a call will be retried without end."""
    recorder = RunRecorder(str(tmp_path), 0.0)
    following = asyncio.create_task(recorder.follow(0, 60.0))
    await asyncio.sleep(0)
    await recorder.close()
    assert await asyncio.wait_for(following, 5.0) == ([], {"doing": {}})


async def test_a_recorder_that_begins_again_writes_no_row_twice(tmp_path):
    ended = [{"sample_id": f"e0-{i}-0", "num_generated": i} for i in range(3)]
    for _ in range(2):
        recorder = RunRecorder(str(tmp_path), 0.0)
        await recorder.record("step", {"step": 0})
        await recorder.record_many("sample", [{"step": 0, "sample_id": i} for i in range(2)])
        await recorder.record_missing("ended", ended[:2])
        await recorder.close()
    recorder = RunRecorder(str(tmp_path), 0.0)
    await recorder.record_missing("ended", ended)
    await recorder.close()
    assert read(tmp_path, "metrics.jsonl") == [{"step": 0}]
    samples = read(tmp_path, "samples.jsonl")
    assert samples == [{"step": 0, "sample_id": 0}, {"step": 0, "sample_id": 1}]
    assert read(tmp_path, "ended.jsonl") == ended


# -- folder ----------------------------------------------------------------------------------------


def write(folder, name, *rows, tail=""):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)


def read(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.fixture
def folder(tmp_path):
    steps = [{"step": s, "time_s": 10.0 * s, "tokens_generated": 40 * s} for s in range(4)]
    write(tmp_path, "metrics.jsonl", *steps, tail='{"step": 4, "ti')
    write(tmp_path, "samples.jsonl", *({"step": s, "n": i} for s in range(4) for i in range(2)))
    write(tmp_path, "timeline.jsonl", {"end_s": 33.0}, {"end_s": 34.5}, tail='{"end_s": 3')
    write(tmp_path, "evaluations.jsonl", *({"policy_version": v} for v in (0, 2, 4)))
    samples = ({"policy_version": v} for v in (0, 2, 4, 5))
    write(tmp_path, "evaluation_samples.jsonl", *samples)
    write(tmp_path, "report.html")
    return tmp_path


def begin(**replaced):
    given = {"step": 2, "policy_version": 2, "rollout": PROGRESS, "before": BEFORE}
    given["checkpoint"] = ray.train.Checkpoint("/gone")
    return Begin(is_resumed=True, **given | replaced)


def test_a_resumed_folder_keeps_what_the_checkpoint_knows(folder):
    resumed, started_at = resume_folder(folder, begin(), now=1000.0)
    assert [row["step"] for row in read(folder, "metrics.jsonl")] == [0, 1]
    assert [row["step"] for row in read(folder, "samples.jsonl")] == [0, 0, 1, 1]
    assert read(folder, "timeline.jsonl") == [{"end_s": 33.0}, {"end_s": 34.5}]
    for name in ("evaluations.jsonl", "evaluation_samples.jsonl"):
        assert [row["policy_version"] for row in read(folder, name)] == [0, 2]
    assert started_at == 1000.0 - 34.5
    assert (resumed.num_rows, resumed.last_version) == (2, 2)
    assert resumed.before.tokens_generated == 120, "as the last row says"
    (note,) = read(folder, "resumes.jsonl")
    assert note == {
        "time_s": 34.5, "step": 2, "policy_version": 2, "steps_repeated": 2, "prompts_pending": 2,
        "samples_kept": 0, "tokens_kept": 0, "tokens_generated": 120, "tokens_lost": 60,
        "ended": "killed",
    }  # fmt: skip


def test_rows_of_what_does_not_come_again_stay_whatever_their_version(folder):
    """known fault: a checkpoint that was taken while steps were trained again has samples of later
    versions than its own, whose rows were taken out."""
    has_ended, goes_on = GROUP
    has_ended = dataclasses.replace(has_ended, finish_reason=FinishReason.STOP)
    samples = samples_table([(has_ended, goes_on)])
    ended = ("e0-0-0", 4), ("e0-1-0", 4), ("e0-1-1", 4), ("e1-1-0", 4), ("e1-2-0", 4), ("e1-3-0", 2)
    dropped = ("e0-2", 4), ("e0-3~1", 4), ("e1-1", 4), ("e1-2", 4), ("e1-3", 2)
    rows = ({"sample_id": name, "policy_version": version} for name, version in ended)
    write(folder, "ended.jsonl", *rows)
    rows = ({"group_id": name, "policy_version": version} for name, version in dropped)
    write(folder, "dropped.jsonl", *rows)
    resume_folder(folder, begin(samples=samples), now=1000.0)
    assert [r["sample_id"] for r in read(folder, "ended.jsonl")] == ["e0-0-0", "e0-1-0", "e1-3-0"]
    assert [r["group_id"] for r in read(folder, "dropped.jsonl")] == ["e0-2", "e0-3~1", "e1-3"]


def test_rows_of_what_goes_on_are_taken_out_whatever_their_version(folder):
    """known fault: without a journal, a group that was dropped after the checkpoint, and under the
    version of that, kept the row, although it went on and was trained."""
    has_ended, goes_on = GROUP
    has_ended = dataclasses.replace(has_ended, finish_reason=FinishReason.STOP)
    samples = samples_table([(has_ended, goes_on)])
    ended = ({"sample_id": f"e0-1-{i}", "policy_version": 2} for i in range(2))
    write(folder, "ended.jsonl", *ended)
    write(folder, "dropped.jsonl", *({"group_id": f"e0-{n}", "policy_version": 2} for n in (1, 2)))
    resume_folder(folder, begin(samples=samples), now=1000.0)
    assert [row["sample_id"] for row in read(folder, "ended.jsonl")] == ["e0-1-0"]
    assert [row["group_id"] for row in read(folder, "dropped.jsonl")] == ["e0-2"]


def test_what_was_lost_stays_lost_where_an_attempt_comes_to_no_step(folder):
    """known fault: the tokens of the steps that were taken out were in no figure any more."""
    first, _ = resume_folder(folder, begin(), now=1000.0)
    write(folder, "final.json", {"wall_s": 40.0, "status": "failed", "error": "no room"})
    second, _ = resume_folder(folder, begin(), now=2000.0)
    assert first.before == second.before
    assert second.before.tokens_generated == 120 and second.before.tokens_discarded["lost"] == 60
    assert [row["steps_repeated"] for row in read(folder, "resumes.jsonl")] == [2, 0]


@pytest.mark.parametrize("survives", ["resumes.jsonl", "metrics.jsonl"])
def test_a_kill_while_steps_are_taken_out_neither_loses_nor_doubles_their_number(
    folder, monkeypatch, survives
):
    """known fault: they were taken out before they were counted."""
    replace = Path.replace

    def kill(self, target):
        if Path(target).name == "metrics.jsonl":
            if survives == "metrics.jsonl":
                replace(self, target)
            raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", kill)
        resume_folder(folder, begin(), now=1000.0)
    resumed, _ = resume_folder(folder, begin(), now=1000.0)
    assert [row["step"] for row in read(folder, "metrics.jsonl")] == [0, 1]
    assert resumed.before.tokens_generated == 120 and resumed.num_rows == 2
    assert sum(row["steps_repeated"] for row in read(folder, "resumes.jsonl")) == 2


@pytest.mark.parametrize("line", ["\0" * 9, '{"step": 1', "3"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "dropped.jsonl"])
@pytest.mark.parametrize("is_last", [True, False])
def test_a_damaged_row_of_a_resumed_folder_is_named(folder, name, line, is_last):
    """known fault: it ended the start in a traceback that named neither file nor line."""
    row = {"step": 0, "policy_version": 0, "group_id": "e0-0"}
    write(folder, name, row, tail=f"{line}\n" + ("" if is_last else json.dumps(row) + "\n"))
    before = (folder / name).read_bytes()
    with pytest.raises(ConfigError, match=rf"RUN_DIR = .*{name}.*: is cut off or no JSON"):
        resume_folder(folder, begin(), now=0.0)
    assert (folder / name).read_bytes() == before


@pytest.mark.parametrize("listed", [True, False])
def test_the_row_of_a_checkpoint_that_a_kill_kept_from_the_folder_is_there_again(
    folder, checkpoint, listed
):
    """known fault: where engines and train workers take turns, a kill in the weight sync after a
    checkpoint left a hole among the steps for good."""
    write(folder, "metrics.jsonl", {"step": 0, "time_s": 1.0, "loss": 3.0, "tokens_generated": 70})
    result = {
        "checkpoint_dir_name": Path(checkpoint.path).name,
        "metrics": {"step": 1, "time_s": 40.0, "loss": 2.0},
    }
    if listed:
        write(Path(checkpoint.path).parent, LIST_FILE, {"checkpoint_results": [result]})
    resumed, started_at = resume_folder(folder, begin(checkpoint=checkpoint), now=1000.0)
    again = {"step": 1, "time_s": 40.0, "loss": 2.0, "tokens_generated": 70}
    assert read(folder, "metrics.jsonl")[1:] == ([again] if listed else [])
    assert resumed.num_rows == 1 + listed
    assert started_at == 1000.0 - (40.0 if listed else 34.5), "the times of rows go on from it"
    write(folder, "begun.json", {"step": 2, "policy_version": 2})
    write(folder, "metrics.jsonl")
    for step in (1, 2):
        resume_folder(folder, begin(step=step, checkpoint=checkpoint), now=1000.0)
        assert read(folder, "metrics.jsonl") == [], "not that of another run"


def test_the_first_row_after_the_checkpoint_of_another_run_is_there_again(folder, checkpoint):
    """known fault: a run that began with one had that hole still."""
    result = {"checkpoint_dir_name": Path(checkpoint.path).name, "metrics": {"step": 5}}
    write(Path(checkpoint.path).parent, LIST_FILE, {"checkpoint_results": [result]})
    write(folder, "begun.json", {"step": 5, "policy_version": 5})
    write(folder, "metrics.jsonl")
    resumed, _ = resume_folder(folder, begin(step=6, checkpoint=checkpoint), now=1000.0)
    assert read(folder, "metrics.jsonl") == [{"step": 5}]
    assert resumed.num_rows == 1


def test_tokens_that_go_on_are_not_lost(folder):
    resumed, _ = resume_folder(folder, begin(samples=samples_table([GROUP])), now=1000.0)
    (note,) = read(folder, "resumes.jsonl")
    assert (note["samples_kept"], note["tokens_kept"], note["tokens_lost"]) == (2, 4, 56)
    assert note["prompts_pending"] == 1, "the one without samples"
    assert resumed.before.ledger.error == 4, "which the new worker takes over"


def test_a_run_without_a_checkpoint_goes_on_from_its_start_in_the_same_folder(folder):
    write(folder, "final.json", {"wall_s": 50.0, "tokens_generated": 160, "error": "stopped"})
    anew = begin(step=0, policy_version=0, rollout=None, before=Counters())
    anew = Begin(is_resumed=anew.is_resumed)
    resumed, started_at = resume_folder(folder, anew, now=1000.0)
    assert read(folder, "metrics.jsonl") == read(folder, "evaluations.jsonl") == []
    assert started_at == 950.0 and resumed.last_version is None
    assert resumed.before == Counters(tokens_generated=160, tokens_discarded={"lost": 160})
    assert read(folder, "resumes.jsonl")[0]["ended"] == "stopped"


@pytest.mark.parametrize("text", [b"", b'{"wall_s": 9', b"[1]", b"\xff"])
def test_a_damaged_end_of_the_part_before_tells_nothing(folder, text):
    """known fault: JSON that is no object ended the start in a traceback."""
    (folder / "final.json").write_bytes(text)
    resume_folder(folder, begin(), now=1000.0)
    assert read(folder, "resumes.jsonl")[0]["ended"] == "killed"


def test_nothing_of_an_earlier_end_stays(folder):
    write(folder, "error.log")
    remove_end(folder)
    assert not {"final.json", "error.log", "report.html"} & {f.name for f in folder.iterdir()}


def test_a_version_that_was_not_evaluated_yet_is_evaluated_after_the_resumption(folder):
    resumed, _ = resume_folder(folder, begin(step=3, policy_version=3), now=0.0)
    assert resumed.last_version == 2
    assert EvaluationConfig(every=3).is_due(3, resumed.last_version)


def test_an_evaluation_that_was_lost_is_made_after_the_resumption(folder):
    """That of version 10 was under way at the kill, and the checkpoint is of 11."""
    write(folder, "evaluations.jsonl", {"policy_version": 0}, {"policy_version": 5})
    resumed, _ = resume_folder(folder, begin(step=11, policy_version=11), now=0.0)
    assert resumed.last_version == 5
    config = EvaluationConfig(every=5)
    assert config.is_due(11, resumed.last_version) and not config.is_due(11)
    resumed, _ = resume_folder(folder, begin(step=9, policy_version=9), now=0.0)
    assert not config.is_due(9, resumed.last_version)


@pytest.mark.parametrize(
    ("began", "version", "is_due"),
    [
        (None, 9, False),
        (None, 10, True),
        (None, 13, True),
        (20, 23, True),
        (21, 23, False),
        (21, 31, True),
    ],
)
def test_the_first_evaluation_is_made_after_the_resumption_if_it_was_lost(
    folder, began, version, is_due
):
    """With ``at_start: false`` a run has none before, and it was under way at the kill."""
    write(folder, "evaluations.jsonl")
    if began is not None:  # with the checkpoint of another run
        write(folder, "begun.json", {"step": began, "policy_version": began})
    at = begin(step=version, policy_version=version)
    resumed, _ = resume_folder(folder, at, now=0.0)
    config = EvaluationConfig(every=10, at_start=False)
    assert config.is_due(version, resumed.last_version) == is_due


def test_two_processes_do_not_train_in_one_folder(tmp_path):
    trained = pytest.raises(ConfigError, match=r"run\.name = .*another process trains it")
    with hold_folder(tmp_path), trained, hold_folder(tmp_path):
        pytest.fail("both hold it")
    with hold_folder(tmp_path):
        assert tmp_path.is_dir()


def test_who_looks_whether_a_folder_is_held_keeps_no_run_out_of_it(tmp_path):
    """known fault: `watch` looks once a second, and a run that began in that moment was refused as
    one that another process trains."""
    with (tmp_path / LOCK_FILE).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as `is_held` does
        timer = threading.Timer(0.1, fcntl.flock, (file, fcntl.LOCK_UN))
        timer.start()
        with hold_folder(tmp_path):
            assert not timer.is_alive()


# -- where it begins -------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write(folder, PROGRESS_FILE, {"step": 2, "policy_version": 2})
    (folder / ROLLOUT_FILE).write_text(PROGRESS.to_json())
    return ray.train.Checkpoint(str(folder))


def plan_of(tmp_path, **replaced):
    run = ray.train.RunConfig(name="mine", storage_path=str(tmp_path))
    return run_spec(run=run, train=TrainConfig(steps=4), **replaced)


def test_a_new_run_begins_anew_or_with_the_checkpoint_that_is_given(tmp_path, checkpoint):
    assert find_begin(plan_of(tmp_path)) == Begin()
    given = find_begin(plan_of(tmp_path, checkpoint=checkpoint))
    assert (given.step, given.rollout, given.before) == (2, PROGRESS, Counters())
    assert given.prompts_again == (1, 5)
    assert not given.is_resumed


def test_a_run_goes_on_with_its_own_last_checkpoint(tmp_path, checkpoint, monkeypatch):
    monkeypatch.setattr(resume, "_last_checkpoint", lambda plan, **_: checkpoint)
    found = find_begin(plan_of(tmp_path))
    assert (found.step, found.policy_version, found.before) == (2, 2, BEFORE)
    assert found.is_resumed


@pytest.fixture
def with_samples(checkpoint):
    table = samples_table([GROUP])
    digest = write_samples(Path(checkpoint.path) / SAMPLES_FILE, table)
    progress = dataclasses.replace(
        PROGRESS,
        samples_digest=digest,
        sampled=sampled_with(SAMPLED, resets=None),
        retries=("e1-2~1",),
    )
    (Path(checkpoint.path) / ROLLOUT_FILE).write_text(progress.to_json())
    return checkpoint


def test_samples_of_a_checkpoint_go_on_and_their_prompts_do_not_come_again(tmp_path, with_samples):
    found = find_begin(plan_of(tmp_path, checkpoint=with_samples, rollout=SAMPLED))
    assert (found.num_samples, found.num_kept, found.prompts_again) == (2, 4, (5,))
    assert found.before == Counters(tokens_generated=4), "another run made them"
    assert found.rollout.retries == ("e1-2~1",)


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ({"group_size": 4}, "group_size"), ({"temperature": 0.5}, "sampling"),
        ({"chat_template_kwargs": {"thinks": False}}, "chat_template_kwargs"),
    ],
)  # fmt: skip
def test_samples_that_were_made_otherwise_begin_anew(tmp_path, with_samples, caplog, section, name):
    sampling = {"sampling": {"temperature": 0.5}} if name == "sampling" else section
    rollout = dataclasses.replace(SAMPLED, **sampling)
    found = find_begin(plan_of(tmp_path, checkpoint=with_samples, rollout=rollout))
    assert found.samples is None and found.prompts_again == (1, 5)
    assert found.rollout.retries == () and found.before == Counters()
    assert f"begin anew: rollout.{name} differ" in caplog.text


def test_samples_do_not_go_on_without_their_variables_of_the_template(
    tmp_path, with_samples, caplog
):
    made = dataclasses.replace(SAMPLED, chat_template_kwargs={"thinks": False})
    progress = json.loads((Path(with_samples.path) / ROLLOUT_FILE).read_text())
    progress["sampled"] = sampled_with(made, resets=None)
    write(Path(with_samples.path), ROLLOUT_FILE, progress)
    assert find_begin(plan_of(tmp_path, checkpoint=with_samples, rollout=SAMPLED)).samples is None
    assert "begin anew: rollout.chat_template_kwargs differ" in caplog.text


def test_samples_without_an_environment_do_not_go_on_with_one(tmp_path, with_samples, caplog):
    class Game(Environment):
        async def step(self, sample):
            return Step(done=True)

    spec = plan_of(tmp_path, checkpoint=with_samples, rollout=SAMPLED, environment=Game())
    assert find_begin(spec).samples is None
    assert "begin anew: environment differ" in caplog.text


def test_a_run_whose_checkpoints_cannot_be_read_does_not_begin_anew(tmp_path, monkeypatch):
    """It would take all rows of the folder out."""

    def fail(*_):
        raise OSError("no route to host")

    monkeypatch.setattr(resume.ray.train.Result, "from_path", fail)
    plan = plan_of(tmp_path)
    assert find_begin(plan) == Begin(), "there is nothing to lose"
    plan.folder.mkdir()
    write(plan.folder, "metrics.jsonl", {"step": 0})
    for ask in (find_begin, last_step):
        with pytest.raises(ResourceError, match=r"cannot be read: no route to host.*Mend"):
            ask(plan)


def test_a_list_of_checkpoints_that_was_damaged_is_an_error(tmp_path):
    plan = plan_of(tmp_path)
    plan.folder.mkdir()
    (plan.folder / "checkpoint_manager_snapshot.json").write_text("{")
    with pytest.raises(ResourceError, match=r"cannot be read"):
        find_begin(plan)


@pytest.mark.parametrize("text", ["", '{"checkpoint_results": ['])
def test_a_list_that_is_being_written_is_said_to_who_asks_for_the_checkpoints(tmp_path, text):
    """known fault: `ray-apr replay` of a run that goes on ended in an error of Ray Train's."""
    plan = plan_of(tmp_path)
    assert kept_checkpoints(plan) == []
    plan.folder.mkdir()
    (plan.folder / "checkpoint_manager_snapshot.json").write_text(text)
    with pytest.raises(ResourceError, match=r"checkpoints in .*mine cannot be read: .*try again"):
        kept_checkpoints(plan)


def test_the_last_step_is_that_of_the_last_checkpoint(tmp_path, checkpoint, monkeypatch):
    assert last_step(plan_of(tmp_path)) == 0
    assert last_step(plan_of(tmp_path, checkpoint=checkpoint)) == 2
    monkeypatch.setattr(resume, "_last_checkpoint", lambda plan, **_: checkpoint)
    assert last_step(plan_of(tmp_path)) == 2


def test_a_checkpoint_with_damaged_samples_is_refused(tmp_path, with_samples):
    with (Path(with_samples.path) / SAMPLES_FILE).open("ab") as file:
        file.write(b"!")
    with pytest.raises(ConfigError, match=r"checkpoint = .*samples\.arrow is damaged"):
        find_begin(plan_of(tmp_path, checkpoint=with_samples, rollout=SAMPLED))


@pytest.mark.parametrize("name", [PROGRESS_FILE, ROLLOUT_FILE])
@pytest.mark.parametrize("damage", [lambda data: data[:-5], lambda _: b"", lambda _: b"\0" * 40])
def test_a_checkpoint_with_a_damaged_file_is_refused(tmp_path, checkpoint, name, damage):
    """known fault: a power cut right after the checkpoint ended the next start in a traceback."""
    file = Path(checkpoint.path) / name
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ConfigError, match=rf"checkpoint = .*{name} is damaged: .*; take another"):
        find_begin(plan_of(tmp_path, checkpoint=checkpoint))


def test_a_checkpoint_of_another_format_is_read_if_it_is_older(tmp_path, checkpoint):
    old = {k: v for k, v in dataclasses.asdict(PROGRESS).items() if k in OF_FORMAT_0}
    file = Path(checkpoint.path) / ROLLOUT_FILE
    file.write_text(json.dumps(old))
    found = find_begin(plan_of(tmp_path, checkpoint=checkpoint))
    assert found.prompts_again == (1, 5) and found.rollout.format == 0
    file.write_text(json.dumps(old | {"format": FORMAT + 1}))
    with pytest.raises(ConfigError, match=rf"'format {FORMAT + 1}'.*formats up to {FORMAT};"):
        find_begin(plan_of(tmp_path, checkpoint=checkpoint))


def test_a_run_that_has_no_checkpoint_is_begun_again(tmp_path):
    plan = plan_of(tmp_path)
    plan.folder.mkdir()
    write(plan.folder, "metrics.jsonl", {"step": 0})
    elsewhere = 1000  # its journal may be there
    assert find_begin(plan) == Begin(is_resumed=True, epoch=elsewhere)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"steps": 2}, r"train\.steps = 2: .* has trained 2 steps, so that none is left"),
        ({"steps": 4, "seed": 1}, r"train\.seed = 1: .*that of the checkpoint, 0"),
    ],
)
def test_what_cannot_go_on_is_refused(tmp_path, checkpoint, train, message):
    run = ray.train.RunConfig(name="mine", storage_path=str(tmp_path))
    with pytest.raises(ConfigError, match=message):
        find_begin(run_spec(run=run, train=TrainConfig(**train), checkpoint=checkpoint))


@pytest.mark.parametrize(
    ("status", "evaluated", "goes_on"),
    [("stopped", 0, True), (None, 0, True), ("ok", 0, False), ("stopped", 2, False)],
)
def test_a_run_that_was_stopped_in_its_last_evaluation_goes_on_with_it(
    tmp_path, monkeypatch, checkpoint, status, evaluated, goes_on
):
    """It was told to go on, and then refused: the last version was never evaluated."""
    monkeypatch.setattr(resume, "_last_checkpoint", lambda plan, **_: checkpoint)
    run = ray.train.RunConfig(name="mine", storage_path=str(tmp_path))
    spec = run_spec(run=run, train=TrainConfig(steps=2), evaluation=EvaluationConfig())
    spec.folder.mkdir()
    write(spec.folder, "metrics.jsonl", {"step": 1})
    write(spec.folder, "evaluations.jsonl", {"policy_version": evaluated})
    if status is not None:
        write(spec.folder, "final.json", {"status": status})
    if goes_on:
        said = resume_line(find_begin(spec), 2, {"train.lora": (None, {})})
        assert "goes on with the evaluation after step 2, " in said
        assert said.endswith("; other settings: train.lora null → {}")
        spec = dataclasses.replace(spec, evaluation=None)
    with pytest.raises(ConfigError, match="none is left"):
        find_begin(spec)


def test_adapters_go_on_as_they_are(tmp_path, checkpoint):
    """known fault: with another alpha a run went on with another policy, and nothing said so; with
    another rank, with adapters or without, it failed once the engines were there."""
    run = ray.train.RunConfig(name="mine", storage_path=str(tmp_path))

    def begun(lora):
        train = TrainConfig(steps=4, lora=lora)
        return find_begin(run_spec(run=run, train=train, checkpoint=checkpoint))

    assert begun(LoRAConfig(alpha=64)).step == begun(None).step == 2, "an older one does not say"
    noted = {"step": 2, "policy_version": 2, "lora_alpha": 32.0}
    write(Path(checkpoint.path), PROGRESS_FILE, noted)
    assert begun(LoRAConfig(rank=4, alpha=32)).step == 2, "nor does one which has no rank"
    with pytest.raises(ConfigError, match=r"train\.lora\.alpha = 64: .* with theirs, 32\.0"):
        begun(LoRAConfig(alpha=64))
    write(Path(checkpoint.path), PROGRESS_FILE, noted | {"lora_rank": 8})
    assert begun(LoRAConfig(rank=8, alpha=32)).step == 2
    with pytest.raises(ConfigError, match=r"train\.lora\.rank = 4: .* with theirs, 8"):
        begun(LoRAConfig(rank=4, alpha=32))
    with pytest.raises(ConfigError, match=r"train\.lora = None: .* has adapters"):
        begun(None)
    write(Path(checkpoint.path), PROGRESS_FILE, noted | {"lora_layers": "k_proj, q_proj"})
    for names in (
        ["q_proj", "k_proj"],
        ["layers.0.q_proj", "layers.1.q_proj", "k_proj"],
        ["q_proj", "k_proj", "fc1"],  # which peft leaves out where the model has none
    ):
        assert begun(LoRAConfig(target_modules=names)).step == 2
    assert begun(LoRAConfig()).step == 2, "the model alone knows which all are"
    with pytest.raises(ConfigError, match=r"lora\.target_modules = .*have one, k_proj, q_proj"):
        begun(LoRAConfig(target_modules=["q_proj"]))
    write(Path(checkpoint.path), PROGRESS_FILE, {"step": 2, "policy_version": 2, "lora_rank": 0})
    assert begun(None).step == 2
    with pytest.raises(ConfigError, match=r"train\.lora = .*: .* has no adapters"):
        begun(LoRAConfig())


def test_passes_that_are_trained_are_refused_once_the_prompts_are_counted(tmp_path, checkpoint):
    run = ray.train.RunConfig(name="mine", storage_path=str(tmp_path))
    rollout = RolloutConfig(group_size=2)
    train = TrainConfig(passes=3, batch_size=4)
    spec = run_spec(run=run, rollout=rollout, train=train, checkpoint=checkpoint)
    assert find_begin(spec).step == 2
    assert find_begin(spec.with_steps(4)).step == 2, "of 6"
    with pytest.raises(
        ConfigError, match=r"steps = 1: .* none is left; raise it .*train\.passes\)"
    ):
        find_begin(spec.with_steps(1))


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    (tmp_path / "other").mkdir()
    plan = plan_of(tmp_path, checkpoint=ray.train.Checkpoint(str(tmp_path / "other")))
    with pytest.raises(ConfigError, match=r"is none of a run of ray_apr: it has no progress\.json"):
        find_begin(plan)
