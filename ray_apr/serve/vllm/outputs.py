"""Requests to vLLM and what it answers, in ray_apr's own values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ray_apr.core.exceptions import RolloutError
from ray_apr.core.messages import SamplingParams
from ray_apr.core.packed import LogProbs, TokenIds
from ray_apr.core.sample import FinishReason, Segment, pack_ids

REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "repetition": FinishReason.STOP,
    "abort": FinishReason.ABORT,
}
"""vLLM's names of ends; others, such as an error, are none of ours."""

_IDS_PER_CHARACTER = 4
"""Most ids that a character takes: the bytes of its UTF-8."""
_UNFINISHED = "\ufffd"
_WHOLE = 1 - 1e-3
"""Least probability of all that could be drawn; what lacks are ids that vLLM had no room for."""


def vllm_params(sampling: SamplingParams, max_tokens: int, vocabulary: int) -> Any:
    """vLLM's own parameters of a call: one final output, text only where it may end the call,
    log-probs of what is drawn."""
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind

    return VLLMSamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        max_tokens=max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        stop=list(sampling.stop_strings),
        include_stop_str_in_output=True,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        logprobs=min(sampling.support_size, vocabulary),
        flat_logprobs=True,
        detokenize=bool(sampling.stop_strings),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def segments_of(
    output: Any, version: int, *, with_support: bool, is_of_one: bool = False
) -> tuple[Segment, ...]:
    """Cut an output at the boundaries that vLLM attests.

    Args:
        output: vLLM's.
        version: The version of all tokens, where it attests none.
        with_support: Whether it tells what could be drawn.
        is_of_one: Whether all tokens are of this version, whatever it attests.

    Raises:
        RolloutError: If a support is not whole.
    """
    ids = TokenIds.of(output.token_ids)
    logprobs, support = _columns(output.logprobs, with_support) if ids else ((), ())
    spans = None if is_of_one else getattr(output, "weight_versions", None)
    if spans is None:
        cuts = [(version, 0, len(ids))]
    else:
        cuts = [(int(s.version), s.start, s.end) for s in spans]
    return tuple(
        Segment(
            policy_version=v,
            token_ids=ids[start:end],
            logprobs=logprobs[start:end],
            support=support[start:end],
        )
        for v, start, end in cuts
        if end > start
    )


def _columns(flat: Any, with_support: bool) -> tuple[Sequence[float], tuple[bytes, ...]]:
    """Log-probs and supports from vLLM's flat log-probs, where a token stands before the likeliest
    ones; those that could not be drawn have no probability. vLLM draws from all that equal the last
    one within top_k, and of so many ties some may lack."""
    if not with_support:
        return LogProbs.of(flat.logprobs), ()  # one number for each token
    support = []
    for begin, end in zip(flat.start_indices, flat.end_indices, strict=True):
        found = zip(flat.token_ids[begin:end], flat.logprobs[begin:end], strict=True)
        drawable = {token: logprob for token, logprob in found if logprob > -math.inf}
        known = sum(map(math.exp, drawable.values()))
        if known < _WHOLE:
            raise RolloutError(
                f"rollout.sampling.top_k: more ids tie with the last one in it than the "
                f"{len(drawable)} "
                f"that vLLM tells, which have {known:.4f} of the probability; in bfloat16 ties "
                'are common: set rollout.engine.dtype to "float32", another top_k, or none'
            )
        support.append(pack_ids(drawable))
    return tuple(flat.logprobs[begin] for begin in flat.start_indices), tuple(support)


def up_to(segments: Sequence[Segment], num_tokens: int) -> tuple[Segment, ...]:
    """The first tokens of segments."""
    kept = []
    for segment in segments:
        if num_tokens > 0:
            kept.append(segment.up_to(num_tokens))
        num_tokens -= len(segment.token_ids)
    return tuple(kept)


def end_of_straddling_stop(
    tokenizer: Any, sampling: SamplingParams, request_ids: Sequence[int], new_ids: Sequence[int]
) -> int | None:
    """Where a stop string ends that began in earlier calls of the turn; vLLM looks at its own call.

    Text is decoded as vLLM does: without special tokens, and an unfinished character is none.

    Args:
        tokenizer: A Hugging Face tokenizer.
        sampling: Stop strings, and how many ids of the request are of the same turn.
        request_ids: What the call began with.
        new_ids: What it made.

    Returns:
        Number of the new tokens up to the one that completes the string; None if there is none.
    """
    carried = list(request_ids[len(request_ids) - sampling.num_carried :])
    longest = max(map(len, sampling.stop_strings), default=0)
    window = carried[-_IDS_PER_CHARACTER * longest :] if longest > 1 else []
    if not window:
        return None

    def decoded(count: int) -> str:
        text: str = tokenizer.decode([*window, *new_ids[:count]], skip_special_tokens=True)
        return text.rstrip(_UNFINISHED)

    cut = before = len(decoded(0))
    for count in range(1, len(new_ids) + 1):
        text = decoded(count)
        for stop in sampling.stop_strings:
            begin = text.find(stop, max(0, before - len(stop) + 1))
            if 0 <= begin < cut and count > sampling.min_tokens:
                return count
        before = len(text)
        if before - cut >= longest - 1:
            return None
    return None
