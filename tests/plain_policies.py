"""What a whole update is compared with: log-probs of samples through a model's own forward pass."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from ray_apr.config import TrainConfig
from ray_apr.train.head import attach_response_logprobs

TRAIN = TrainConfig(learning_rate=0.05, max_grad_norm=1e9)


def load(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    attach_response_logprobs(model)
    return model


class Recorder(torch.optim.SGD):
    """Keeps the gradients that it was given, and goes down them if it is to move."""

    def __init__(self, model, *, moves=False):
        super().__init__(model.parameters(), lr=TRAIN.learning_rate, fused=True)
        self.gradients = []
        self.moves = moves

    def step(self, closure=None):
        self.gradients.append([p.grad.clone() for p in self.param_groups[0]["params"]])
        if self.moves:
            super().step(closure)


class Policies:
    """Log-probs, entropies and the rest of a list of samples, each through the plain model."""

    def __init__(self, samples):
        self.samples = samples
        self.length = max(s.num_tokens for s in samples)
        self.behavior = self.pad([torch.tensor(s.behavior_logprobs) for s in samples])
        self.mask = self.pad([torch.ones(s.num_tokens) for s in samples])
        self.versions = self.pad([torch.tensor(s.token_versions) for s in samples])
        names = list(dict.fromkeys(s.group_id for s in samples))
        self.groups = torch.tensor([names.index(s.group_id) for s in samples])
        self.rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64)

    def pad(self, rows):
        return torch.stack([torch.nn.functional.pad(r, (0, self.length - len(r))) for r in rows])

    def of(self, model):
        """Log-probs and entropies [B, T]."""
        logprobs, entropies = [], []
        for s in self.samples:
            ids = torch.tensor([[*s.prompt.token_ids, *s.response_ids]])
            row = model(input_ids=ids).logits[0, len(s.prompt.token_ids) - 1 : -1].log_softmax(-1)
            entropies.append(-(row.exp() * row).sum(-1))
            logprobs.append(row.gather(1, torch.tensor(s.response_ids)[:, None])[:, 0])
        return self.pad(logprobs), self.pad(entropies)


def gradients_of(loss, model):
    model.zero_grad()
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return gradients


def distance(ours, theirs):
    difference = sum((a - b).double().square().sum() for a, b in zip(ours, theirs, strict=True))
    return (difference / sum(b.double().square().sum() for b in theirs)).sqrt().item()
