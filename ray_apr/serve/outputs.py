"""Requests to vLLM and what it answers, in ray_apr's own values."""

from __future__ import annotations

from typing import Any

from ray_apr.types import FinishReason, SamplingParams, Segment

REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "repetition": FinishReason.STOP,
    "abort": FinishReason.ABORT,
}
"""vLLM's names of ends; others, such as an error, are none of ours."""


def vllm_params(sampling: SamplingParams, max_tokens: int) -> Any:
    """vLLM's own parameters of a call: one final output, ids only, log-probs of what is drawn."""
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind

    return VLLMSamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        max_tokens=max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def segments_of(output: Any, version: int) -> tuple[Segment, ...]:
    """Cut an output at the boundaries that vLLM attests; `version` where it attests none."""
    ids = tuple(output.token_ids)
    logprobs = tuple(output.logprobs.logprobs) if ids else ()  # flat: one number for each token
    spans = getattr(output, "weight_versions", None)
    if spans is None:
        cuts = [(version, 0, len(ids))]
    else:
        cuts = [(int(s.version), s.start, s.end) for s in spans]
    return tuple(
        Segment(policy_version=v, token_ids=ids[start:end], logprobs=logprobs[start:end])
        for v, start, end in cuts
        if end > start
    )
