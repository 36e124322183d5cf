"""Samples of several turns: what an environment says, and interruptions at any moment of it."""

from __future__ import annotations

import asyncio
import types

import numpy as np
import pytest
import torch
from jinja2.exceptions import TemplateError

from ray_apr.core.exceptions import RolloutError, StepError
from ray_apr.core.messages import Generation
from ray_apr.core.sample import FinishReason, Prompt, Sample, Segment
from ray_apr.core.user import Environment, RewardResult, Step
from ray_apr.rollout.turns import encode_step, turn_rules
from ray_apr.scheduling.live import TurnRules
from tests.fakes import FIRST_OBSERVED, FIRST_TOKEN, ScriptedEngine
from tests.rollout_run import Scorer, Tokenizer, running, until, without_ray


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    without_ray(monkeypatch)


class Tools(Scorer):
    """Answers each turn with two tokens and gives the reward after `num_turns`.

    While `gate` is not set, steps do not return. `bad` names samples whose steps fail.
    """

    def __init__(self, num_turns=2, bad=()) -> None:
        super().__init__(bad)
        self.num_turns = num_turns
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked: list[Sample] = []

    async def reset(self, sample):
        return Step(token_ids=(FIRST_OBSERVED, FIRST_OBSERVED + 1))

    async def step(self, sample):
        self.asked.append(sample)
        await self.gate.wait()
        if sample.sample_id in self.bad:
            raise StepError(sample.sample_id, "raised", "no tool")
        if sample.num_turns == self.num_turns or sample.finish_reason is not None:
            return Step(done=True, reward=float(sample.num_turns))
        here = FIRST_OBSERVED + sample.num_tokens
        state = {"seen": [*sample.environment_state.get("seen", ()), sample.num_turns]}
        return Step(token_ids=(here, here + 1), state=state)


def engine_of_turns(**kwargs):
    return ScriptedEngine(default_length=99, turn_length=3, **kwargs)


async def test_turns_alternate_with_the_environment_whose_tokens_are_not_trained():
    tools = Tools()
    async with running(engine_of_turns(auto=1), scorer=tools, turns=TurnRules()) as run:
        samples = await run.step(0)
    for sample in samples:
        generated, observed = range(FIRST_TOKEN, FIRST_TOKEN + 8), (3, 4)
        expected = [i if i - FIRST_TOKEN not in observed else i + 4000 for i in generated]
        assert list(sample.response_ids) == expected
        assert sample.loss_mask() == (True,) * 3 + (False,) * 2 + (True,) * 3
        assert (sample.num_turns, sample.reward) == (2, 2.0)
        assert sample.finish_reason is FinishReason.STOP
        assert sample.environment_state == {"seen": [1]}
    assert {s.turn_text for s in tools.asked} == {"1000 1001 1002", "1005 1006 1007"}
    await run.check_ledger(run.summary)


async def test_a_turn_that_the_budget_cut_can_be_read_where_the_reward_is_asked_for():
    """known fault: an environment that looks at `turn_text` gave such a turn nothing."""
    tools, ended = Tools(num_turns=9), []

    async def score(sample):
        ended.append(sample)
        return RewardResult(reward=1.0)

    tools.score = score
    async with running(engine_of_turns(auto=1), scorer=tools, turns=TurnRules()) as run:
        await run.step(0)
    assert {(s.turn_text, s.num_turns, s.finish_reason) for s in ended} == {
        ("1015", 4, FinishReason.LENGTH)
    }


async def test_a_sync_during_a_tool_call_keeps_the_conversation():
    """verl#4067: a pause did not hold a sample whose tool call returned meanwhile."""
    tools, engine = Tools(), engine_of_turns()
    async with running(engine, scorer=tools, turns=TurnRules(), max_staleness=2) as run:
        await until(lambda: len(engine.running) == 8)
        tools.gate.clear()
        engine.advance(3)
        await until(lambda: len(tools.asked) == 8)
        arrived, receive = asyncio.Event(), engine.receive_weights

        async def receive_later(*args, **kwargs):
            await arrived.wait()
            await receive(*args, **kwargs)

        engine.receive_weights = receive_later
        await run.worker.begin_sync(1)
        tools.gate.set()
        await asyncio.sleep(0.02)
        engine.advance(3)
        assert not any(r.tokens for r in engine._running.values()), "the engine is paused"
        arrived.set()
        await run.worker.finish_sync(1)
        await until(lambda: len(engine.running) == 8)
        engine.advance(3)
        samples = await run.step(1)
        for sample in samples:
            assert sample.token_versions == (0,) * 5 + (1,) * 3
            assert sample.loss_mask() == (True,) * 3 + (False,) * 2 + (True,) * 3
            assert (sample.num_interruptions, sample.reward) == (0, 2.0)
    assert run.summary.samples_interrupted == 0
    await run.check_ledger(run.summary)


async def test_a_sync_inside_a_later_turn_resumes_with_tool_results_and_masks():
    tools, engine = Tools(), engine_of_turns()
    async with running(engine, scorer=tools, turns=TurnRules(), max_staleness=2) as run:
        await until(lambda: len(engine.running) == 8)
        engine.advance(3)
        await until(lambda: len(engine.running) == 8 and len(engine.calls) == 16)
        engine.advance(1)
        await run.sync(1)
        await until(lambda: len(engine.running) == 8)
        assert {budget for _, _, budget in engine.calls[16:]} == {16 - 6}
        engine.advance(2)
        for sample in await run.step(1):
            assert sample.token_versions == (0,) * 6 + (1,) * 2
            assert sample.loss_mask() == (True,) * 3 + (False,) * 2 + (True,) * 3
            assert (sample.num_interruptions, sample.num_turns) == (1, 2)
    await run.check_ledger(run.summary)


async def test_an_answer_for_a_sample_that_began_anew_is_ignored():
    tools, engine = Tools(), engine_of_turns()
    async with running(
        engine, scorer=tools, turns=TurnRules(), max_staleness=1, interrupt="batch_full",
        after_interrupt="restart",
    ) as run:  # fmt: skip
        await until(lambda: len(engine.running) == 8)
        tools.gate.clear()
        engine.advance(3)
        await until(lambda: len(tools.asked) == 8)
        await run.sync(1)
        await until(lambda: len(engine.running) == 8)
        tools.gate.set()
        await asyncio.sleep(0.02)
        assert {budget for _, _, budget in engine.calls[8:]} == {16}, "nothing was observed"
        engine.advance(3)
        await until(lambda: len(engine.running) == 8 and len(engine.calls) == 24)
        engine.advance(3)
        assert {v for s in await run.step(1) for v in s.token_versions} == {1}
    assert run.summary.ledger.discarded["restarted"] == 8 * 3
    await run.check_ledger(run.summary)


async def test_a_failed_step_drops_its_group_and_is_no_zero():
    tools = Tools(bad={"e0-0-1"})
    async with running(engine_of_turns(auto=1), scorer=tools, turns=TurnRules()) as run:
        samples = await run.step(0)
        assert "e0-0" not in {s.group_id for s in samples}
        assert {s.reward for s in samples} == {2.0}
    assert run.summary.ledger.discarded["failed"] > 0
    await run.check_ledger(run.summary)


async def test_steps_that_succeed_do_not_hide_that_no_reward_does():
    tools = Tools(bad={"all"})
    async with running(
        engine_of_turns(auto=1), scorer=tools, turns=TurnRules(max_turns=1),
        rollout={"max_consecutive_failures": 3},
    ) as run:  # fmt: skip
        with pytest.raises(RolloutError, match=r"3 rewards failed in a row.*no judge"):
            await run.step(0)
    await run.check_ledger(run.summary)


async def test_the_environment_begins_and_turns_are_limited():
    rules = TurnRules(resets=True, max_turns=2)
    tools = Tools(num_turns=9)
    async with running(engine_of_turns(auto=1), scorer=tools, turns=rules) as run:
        for sample in await run.step(0):
            assert sample.loss_mask()[:2] == (False, False)
            assert sample.num_turns == 2
            assert sample.finish_reason is FinishReason.LENGTH
            assert sample.reward == 1.0, "the reward function's"
    await run.check_ledger(run.summary)


# -- what is said, as token ids ------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


class CharTokenizer:
    """One id for each character, special tokens beside them, and a chat template."""

    special = ("<eos>", "<end>")

    def __init__(self, template=TEMPLATE) -> None:
        self._template = template

    def decode(self, token_ids):
        return "".join(self.special[i] if i < len(self.special) else chr(i) for i in token_ids)

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [ord(c) for c in text]}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt=False):
        import jinja2

        assert not tokenize
        template = jinja2.Environment().from_string(self._template)
        return template.render(messages=messages, add_generation_prompt=add_generation_prompt)


def sample_after(*turn):
    prompt = Prompt(prompt_id="g", token_ids=(1,))
    sample = Sample(sample_id="g-0", group_id="g", prompt=prompt, max_response_tokens=99)
    if not turn:
        return sample
    segment = Segment(policy_version=0, token_ids=turn, logprobs=(0.0,) * len(turn))
    generation = Generation(request_id="r", segments=(segment,), finish_reason=FinishReason.STOP)
    return sample.append(generation, ends_turn=True)


def said(step, *turn, template=TEMPLATE):
    ids = encode_step(CharTokenizer(template), sample_after(*turn), step)
    return "".join(map(chr, ids))


def test_text_and_ids_are_taken_as_they_are():
    assert said(Step(text="06"), 65) == "06"
    assert encode_step(None, sample_after(65), Step(token_ids=(7, 8))) == (7, 8)
    assert encode_step(None, sample_after(65), Step()) == ()


def test_an_answer_without_a_token_is_refused():
    """Two turns became one, which the next step was asked about."""

    class Strips(CharTokenizer):
        def __call__(self, text, add_special_tokens):
            return super().__call__(text.strip(), add_special_tokens)

    with pytest.raises(StepError, match="says ' ', which has no tokens"):
        encode_step(Strips(), sample_after(65), Step(text=" "))
    assert encode_step(Strips(), sample_after(), Step(text=" ")) == ()


def test_ids_of_a_step_are_plain_numbers_and_messages_are_mappings():
    """An engine's core ended at a tensor, and a template said nothing of what has no role."""
    for ids in (np.array([7, 8]), torch.tensor([7, 8])):
        assert {type(i) for i in Step(token_ids=ids).token_ids} == {int}
    for ids in ((7.0,), torch.tensor([[7, 8]]), ("7",)):
        with pytest.raises(ValueError, match="whole numbers"):
            Step(token_ids=ids)
    for messages in ({"role": "tool", "content": "4"}, ("4",)):
        with pytest.raises(ValueError, match="mappings with a role"):
            Step(messages=messages)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"token_ids": (7, -1)}, "at least 0 .* not -1"),
        ({"token_ids": (7, 2**31)}, "below 2.31, not 2147483648"),
        ({"text": ["one", "two"]}, "text of a step is a str"),
        ({"text": b"4"}, "text of a step is a str"),
        ({"text": "4", "done": "no"}, "True or False, not 'no'"),
        ({"text": "4", "done": None}, "True or False, not None"),
        ({"text": "4", "state": [1]}, "state of a step is a mapping"),
        ({"done": True, "reward": "1"}, "finite number, got '1'"),
        ({"done": True, "reward": [1.0]}, "finite number"),
    ],
)
def test_what_a_step_cannot_have_is_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        Step(**fields)


def test_numpys_truth_is_taken_as_that():
    assert Step(done=np.bool_(True), reward=np.float32(0.5)).done is True


def test_messages_continue_the_conversation_as_the_template_does():
    step = Step(messages=({"role": "tool", "content": "4"},))
    assert said(step, 65, 0) == "\n<tool>4\n<assistant>", "the turn ended with <eos> itself"
    assert said(step, 65) == "<eos>\n<tool>4\n<assistant>", "it ended with another stop token"


def test_the_token_that_ends_a_turn_in_the_template_is_said_once():
    """In Gemma's template a turn does not end with the tokenizer's `eos_token`."""
    step = Step(messages=({"role": "tool", "content": "4"},))
    template = TEMPLATE.replace("<eos>", "<end>")
    assert said(step, 65, 1, template=template) == "\n<tool>4\n<assistant>"
    assert said(step, 65, 0, template=template) == "<end>\n<tool>4\n<assistant>"


def test_thoughts_that_a_template_takes_out_of_earlier_turns_stay():
    """Qwen3's template writes them, be they empty, into the last message alone."""
    step = Step(messages=({"role": "tool", "content": "4"},))
    thinks = TEMPLATE.replace(
        "<{{ m.role }}>",
        "<{{ m.role }}>{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}",
    )
    assert said(step, 65, 0, template=thinks) == "\n<tool>4\n<assistant>"
    ends = TEMPLATE + "{% if not add_generation_prompt %}<end>{% endif %}"
    assert said(step, 65, 0, template=ends) == "\n<tool>4\n<assistant>", "Phi-3's ends a text so"


def test_messages_that_a_template_leaves_out_are_an_error():
    """known fault: Phi-3's and Gemma's know no tools; the policy read nothing of theirs."""
    skips = TEMPLATE.replace(
        "{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"
    )
    assert skips != TEMPLATE
    tool, user = ({"role": role, "content": "4\n5"} for role in ("tool", "user"))
    assert said(Step(messages=(user,)), 65, template=skips).endswith("<user>4\n5\n<assistant>")
    with pytest.raises(StepError, match="leaves out messages of role 'tool'; say them as user"):
        said(Step(messages=(user, tool)), 65, template=skips)
    quotes = TEMPLATE.replace("m.content", "m.content | tojson")
    assert '<tool>"4\\n5"' in said(Step(messages=(tool,)), 65, template=quotes)


def test_a_template_that_cannot_continue_is_an_error():
    rewrites = "{{ messages | length }}" + TEMPLATE
    step = Step(messages=({"role": "tool", "content": "4"},))
    with pytest.raises(StepError, match="does not continue"):
        said(step, 65, template=rewrites)
    with pytest.raises(StepError, match="before the first turn"):
        said(step)
    with pytest.raises(StepError, match="cannot be encoded: 'roles' is undefined"):
        said(step, 65, template="{{ roles.alternate }}")


async def test_a_message_that_the_template_refuses_drops_its_group_alone(monkeypatch):
    """known fault: it ended the run."""

    class Alternating(Tokenizer):
        def apply_chat_template(self, messages, **_):
            raise TemplateError("roles must alternate")

    class Chat(Scorer):
        async def step(self, sample):
            says = () if sample.sample_id != "e0-0-1" else ({"role": "tool", "content": "4"},)
            return Step(done=not says, reward=None if says else 1.0, messages=says)

    monkeypatch.setattr("tests.rollout_run.Tokenizer", Alternating)
    async with running(engine_of_turns(auto=1), scorer=Chat(), turns=TurnRules()) as run:
        samples = await run.step(0)
        assert "e0-0" not in {sample.group_id for sample in samples}
        await until(lambda: any(row["kind"] == "dropped" for row in run.recorder.rows))
    (row,) = [row for row in run.recorder.rows if row["kind"] == "dropped"]
    assert row["group_id"] == "e0-0" and "roles must alternate" in row["error"]


async def test_what_is_said_after_the_last_turn_is_not_encoded():
    """known fault: where it could not be, a group was dropped that had ended; here each one."""

    class Chat(Scorer):
        async def step(self, sample):
            return Step(messages=({"role": "user", "content": "go on"},), state={"asked": 1})

    rules = TurnRules(max_turns=1)  # the tokenizer has no template
    async with running(engine_of_turns(auto=1), scorer=Chat(), turns=rules) as run:
        for sample in await run.step(0):
            assert (sample.num_turns, sample.finish_reason) == (1, FinishReason.LENGTH)
            assert sample.environment_state == {"asked": 1}


def test_rules_follow_from_the_environment():
    class Silent(Environment):
        def step(self, sample):
            return Step(done=True)

    class Speaks(Silent):
        def reset(self, sample):
            return Step(text="go")

    assert turn_rules(None, None) is None
    assert turn_rules(Silent(), 3) == TurnRules(resets=False, max_turns=3)
    assert turn_rules(Speaks(), None) == TurnRules(resets=True)
    for own, resets in ((Silent(), False), (Speaks(), True)):  # known fault: never asked before
        wraps = types.SimpleNamespace(step=own.step, reset=own.reset)  # or by __getattr__
        assert turn_rules(wraps, None) == TurnRules(resets=resets)
    duck = types.SimpleNamespace(step=lambda sample: Step(done=True))
    assert turn_rules(duck, None) == TurnRules(resets=False), "a protocol, not a base class"
