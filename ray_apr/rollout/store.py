"""Store: the payload of every live sample, from admission until it is handed over or dropped.

Invariants, kept here:
    * A sample gets tokens through `append` and `observe` alone, that is through the methods of
      `Sample`, which keep ids, log-probs, versions, masks and the budget in step (invariant 5);
      `restart` takes them all away.
    * `held_tokens` is always the sum of the generated tokens of samples that have not ended.

Pure: no I/O, no ray, no torch. States are the dispatcher's; the places of tokens are the ledger's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ray_apr.exceptions import RolloutError
from ray_apr.types import FinishReason, Generation, Sample


class SampleStore:
    """Live samples by id, in order of admission.

    Example:
        >>> from ray_apr.types import Prompt, Sample
        >>> prompt = Prompt(prompt_id="e0-0", token_ids=(1, 2))
        >>> store = SampleStore()
        >>> store.add(
        ...     Sample(sample_id="s", group_id="g", prompt=prompt, max_response_tokens=4)
        ... )
        >>> "s" in store, store.held_tokens, len(store.pop(["s"])), len(store)
        (True, 0, 1, 0)
    """

    def __init__(self) -> None:
        self._samples: dict[str, Sample] = {}
        self._members: dict[str, list[str]] = {}
        self._held_tokens = 0

    @property
    def held_tokens(self) -> int:
        """Generated tokens of samples that have not ended, wherever these are."""
        return self._held_tokens

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[Sample]:
        """Samples in order of admission, as they are now; the store may change meanwhile."""
        return iter(tuple(self._samples.values()))

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self._samples

    def add(self, sample: Sample) -> None:
        """Take in a new sample, or one that is restored with its tokens.

        Raises:
            RolloutError: If its id is there already.
        """
        if sample.sample_id in self._samples:
            raise RolloutError(f"sample {sample.sample_id} is in the store already")
        self._samples[sample.sample_id] = sample
        self._members.setdefault(sample.group_id, []).append(sample.sample_id)
        self._held_tokens += _held(sample)

    def get(self, sample_id: str) -> Sample:
        """The sample as it is now.

        Raises:
            RolloutError: If it is not there.
        """
        try:
            return self._samples[sample_id]
        except KeyError:
            raise RolloutError(
                f"sample {sample_id} is not in the store: it was handed over or dropped"
            ) from None

    def group(self, group_id: str) -> list[Sample]:
        """Samples of a group, in order of admission; empty when none is there."""
        return [self._samples[i] for i in self._members.get(group_id, ())]

    def append(self, sample_id: str, generation: Generation, *, ends_turn: bool = False) -> Sample:
        """Add the tokens of one generate call and return the sample as it is then.

        Raises:
            RolloutError: If the sample is not there, or its tokens cannot be added.
        """
        old = self.get(sample_id)
        return self._put(old, old.append(generation, ends_turn=ends_turn))

    def observe(
        self, sample_id: str, token_ids: Sequence[int], *, state: Mapping[str, Any] | None = None
    ) -> Sample:
        """Add what the environment of a sample said and return the sample as it is then.

        Raises:
            RolloutError: If it is not there, or nothing may be said now.
        """
        old = self.get(sample_id)
        return self._put(old, old.observe(token_ids, state=state))

    def finish(
        self, sample_id: str, reason: FinishReason, *, state: Mapping[str, Any] | None = None
    ) -> Sample:
        """End a sample whose last turn is over and return it.

        Raises:
            RolloutError: If it is not there, or in the middle of a turn.
        """
        old = self.get(sample_id)
        return self._put(old, old.finish(reason, state=state))

    def restart(self, sample_id: str) -> Sample:
        """Take the tokens of a sample that has not ended away; returns it as it was.

        Raises:
            RolloutError: If it is not there, or has ended.
        """
        old = self.get(sample_id)
        self._put(old, old.restart())
        return old

    def replace(self, sample: Sample) -> Sample:
        """Put a sample with a text or a reward in the place of what is there.

        Raises:
            RolloutError: If it is not there, or its prompt, tokens or ending are not the same:
                those change in the methods above alone.
        """
        old = self.get(sample.sample_id)
        if _frozen(old) != _frozen(sample):
            raise RolloutError(
                f"sample {sample.sample_id} was replaced by one with another prompt, other tokens "
                "or another ending; only append, observe and finish change those"
            )
        return self._put(old, sample)

    def pop(self, sample_ids: Iterable[str]) -> list[Sample]:
        """Take samples out, in the order asked for.

        Raises:
            RolloutError: If one is not there; then none is taken out.
        """
        samples = [self.get(i) for i in dict.fromkeys(sample_ids)]
        for sample in samples:
            del self._samples[sample.sample_id]
            members = self._members[sample.group_id]
            members.remove(sample.sample_id)
            if not members:
                del self._members[sample.group_id]
            self._held_tokens -= _held(sample)
        return samples

    def pop_group(self, group_id: str) -> list[Sample]:
        """Take a whole group out; empty when none of it is there."""
        return self.pop(tuple(self._members.get(group_id, ())))

    def _put(self, old: Sample, new: Sample) -> Sample:
        self._samples[new.sample_id] = new
        self._held_tokens += _held(new) - _held(old)
        return new


def _held(sample: Sample) -> int:
    """Generated tokens of a sample that has not ended."""
    return sample.num_generated if sample.finish_reason is None else 0


def _frozen(sample: Sample) -> tuple[Any, ...]:
    """What `replace` must not change."""
    return (
        sample.group_id,
        sample.prompt.token_ids,
        sample.max_response_tokens,
        sample.segments,
        sample.finish_reason,
        sample.num_interruptions,
        sample.num_turns,
        sample.awaits_step,
        sample.environment_state,
    )
