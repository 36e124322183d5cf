"""What a user may put in the places of ours, as files that a run's YAML names."""

from __future__ import annotations


class FewestTokensLeft:
    """A resume order."""

    def __call__(self, live):
        return live.sample.remaining_budget


def two_groups_at_a_time(load):
    """An admission rule."""
    return load.room._replace(num_groups=min(2, load.room.num_groups))


def advantage(rewards, groups, scale):
    return (rewards - rewards.mean()) * scale


def loss(logprobs, proximal_logprobs, advantages, mask, *, behavior_logprobs, floor):
    age = (proximal_logprobs - behavior_logprobs).exp().clamp(min=floor, max=2.0)
    return -(logprobs - proximal_logprobs).exp() * advantages, {"age": age}


def correction(proximal_logprobs, behavior_logprobs, mask, cap):
    return (proximal_logprobs - behavior_logprobs).exp().clamp(max=cap)
