"""What an environment says, as token ids that follow what the policy generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ray_apr.core.exceptions import StepError, one_line
from ray_apr.core.sample import Sample
from ray_apr.core.user import Environment, Step
from ray_apr.scheduling.live import TurnRules

_MARK = "apr-mark"


def turn_rules(environment: Environment | None, max_turns: int | None) -> TurnRules | None:
    """Rules of a run with this environment; None without one."""
    if environment is None:
        return None
    reset = getattr(environment, "reset", None)  # perhaps that of another one, which it wraps
    resets = callable(reset) and getattr(reset, "__func__", reset) is not Environment.reset
    return TurnRules(resets=resets, max_turns=max_turns)


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Token ids as people read them, without special tokens."""
    return str(tokenizer.decode(token_ids, skip_special_tokens=True))


def with_texts(tokenizer: Any, sample: Sample) -> Sample:
    """A sample that has ended with what its reward reads: the response as text, and where it has
    turns the last one, as an environment that gives the reward is asked once more."""
    if sample.num_turns and sample.turn_text is None:  # else its environment was asked about it
        sample = replace(sample, turn_text=decode(tokenizer, sample.turn_ids))
    return replace(sample, response_text=decode(tokenizer, sample.response_ids))


def encode_step(tokenizer: Any, sample: Sample, step: Step) -> tuple[int, ...]:
    """Encode what a step says; what was generated before stays as it is.

    Args:
        tokenizer: A Hugging Face tokenizer, for messages with a chat template.
        sample: Before the step.
        step: Of its environment.

    Raises:
        StepError: If messages come where the template cannot continue: before the first turn, or
            because it renders what was asked in another way once others follow, or leaves them
            out; if it or the tokenizer refuses them; or if nothing is left of an answer to a turn.
    """
    if not (step.messages or step.text):
        return step.token_ids
    try:
        text = _continuation(tokenizer, sample, step) if step.messages else step.text
        token_ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    except StepError:
        raise
    except Exception as error:  # a template may raise anything
        raise StepError(
            sample.sample_id, "invalid", f"cannot be encoded: {one_line(error)}"
        ) from error
    if not token_ids and sample.awaits_step:  # nothing would stand between two turns
        raise StepError(
            sample.sample_id, "invalid", f"says {text!r}, which has no tokens; say something"
        )
    return token_ids


def _continuation(tokenizer: Any, sample: Sample, step: Step) -> str:
    """The template's text from the end of an assistant's turn to the begin of its next one."""
    turn = sample.turn_ids
    if not turn:
        raise StepError(
            sample.sample_id,
            "invalid",
            "says messages before the first turn; say text or token_ids",
        )
    asked = {"role": "user", "content": _MARK}
    answered = [asked, {"role": "assistant", "content": _MARK}]
    first = tokenizer.apply_chat_template([asked], tokenize=False)

    def followed_by(*messages: Mapping[str, Any]) -> str:
        text: str = tokenizer.apply_chat_template(
            [*answered, *messages], tokenize=False, add_generation_prompt=True
        )
        return text

    after = followed_by(*step.messages)
    # what it makes of the turn itself is of no matter, as some take the thoughts out of earlier
    # ones: what was generated stays as it is
    begin = first.partition(_MARK)[0] + _MARK
    _, answer, closing = after.removeprefix(begin).partition(_MARK)
    if not (after.startswith(begin) and answer):
        raise StepError(
            sample.sample_id,
            "invalid",
            "the chat template does not continue a conversation; say text or token_ids",
        )
    marked, marks = list(step.messages), {}
    for number, message in enumerate(step.messages):
        if isinstance(message.get("content"), str) and message["content"]:
            mark = f"{_MARK}-{number}-"
            marks[mark], marked[number] = message.get("role"), {**message, "content": mark}
    text = followed_by(*marked)
    for mark, role in marks.items():
        if mark not in text:
            raise StepError(
                sample.sample_id,
                "invalid",
                f"the chat template leaves out messages of role {role!r}; say them as user, or "
                "say text",
            )
    # the policy may have written the token itself that ends its turn; often it is not `eos_token`
    return closing.removeprefix(tokenizer.decode([turn[-1]]))
