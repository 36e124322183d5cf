"""Make the base model of the arithmetic example: a tiny Qwen3 that imitates careless students.

The warm-up is supervised, on demonstrations drawn afresh for every step:

1. careful students, short sums only: the format and the addition table;
2. careful students, short and long sums: finding the right digits of long operands;
3. careless students, who make a mistake in 45% of the columns: the model learns to be right about
   as often as they are. Reinforcement learning then has to make it careful again.

Run: ``python examples/arithmetic/make_base_model.py``
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import time
from pathlib import Path

import task
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

logger = logging.getLogger(__name__)

HERE = Path(__file__).resolve().parent
SPECIAL_TOKENS = ["<pad>", "<eos>", "<unk>"]
CONTEXT_LENGTH = 256
"""Most tokens of prompt and response together."""
IGNORED = -100
"""Label of the positions without a loss: prompt and padding."""
SHORT_DIGITS = (1, 2, 2, 3)
LONG_DIGITS = (12, 13)
SHORT_BATCH, LONG_BATCH = 48, 12
"""Demonstrations per step."""
WARMUP_STEPS = 30
"""Steps in which the learning rate rises."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character of the task."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *task.ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, hidden_size: int = 128, num_layers: int = 4
) -> Qwen3ForCausalLM:
    """Return a randomly initialised Qwen3 with float32 parameters, embeddings tied.

    Args:
        tokenizer: Of the task.
        hidden_size: A multiple of 64; 128 with 4 layers makes 0.6M parameters.
        num_layers: Decoder layers.
    """
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 64,
        head_dim=32,
        max_position_embeddings=CONTEXT_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config).float()


def demonstration(
    rng: random.Random, num_digits: int, mistake_probability: float
) -> tuple[str, str]:
    """Return a fresh prompt and a student's response to it."""
    left, right = task.sample_operands(rng, num_digits)
    response = task.worked_answer(left, right, mistake_probability=mistake_probability, rng=rng)
    return task.prompt_text(left, right), response


def make_batch(
    rng: random.Random,
    tokenizer: PreTrainedTokenizerFast,
    digits_B: list[int],
    mistake_probability: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids [B, T] and labels [B, T] of one demonstration per entry of `digits_B`."""
    token_id = tokenizer.get_vocab()
    rows = []
    for num_digits in digits_B:
        prompt, response = demonstration(rng, num_digits, mistake_probability)
        ids = [token_id[char] for char in prompt + response] + [tokenizer.eos_token_id]
        rows.append((ids, [IGNORED] * len(prompt) + ids[len(prompt) :]))
    length = max(len(ids) for ids, _ in rows)
    pad = tokenizer.pad_token_id
    ids_BT = torch.tensor([ids + [pad] * (length - len(ids)) for ids, _ in rows])
    labels_BT = torch.tensor([labels + [IGNORED] * (length - len(labels)) for _, labels in rows])
    return ids_BT, labels_BT


def learning_rate(step: int, num_steps: int, peak: float) -> float:
    """Linear rise over `WARMUP_STEPS`, then a cosine from `peak` to a twentieth of it."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / num_steps))
    return peak * min(1.0, (step + 1) / WARMUP_STEPS) * (0.05 + 0.95 * cosine)


def step_batches(
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, progress: float, mistakes: float
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the short and the long batch of a step at `progress` in [0, 1) of the warm-up."""
    mistake_probability = mistakes if progress >= 0.8 else 0.0
    digits = [[rng.choice(SHORT_DIGITS) for _ in range(SHORT_BATCH)]]
    if progress >= 0.25:
        digits.append([rng.choice(LONG_DIGITS) for _ in range(LONG_BATCH)])
    return [make_batch(rng, tokenizer, digits_B, mistake_probability) for digits_B in digits]


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    num_steps: int,
    peak_lr: float,
    mistakes: float,
    seed: int,
) -> None:
    """Warm the model up in place; the loss is the mean over response tokens of a step."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.98))
    start = time.monotonic()
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, num_steps, peak_lr)
        batches = step_batches(rng, tokenizer, step / num_steps, mistakes)
        num_tokens = sum(int((labels != IGNORED).sum()) for _, labels in batches)
        losses = []
        for ids_BT, labels_BT in batches:
            logits_BTV = model(input_ids=ids_BT.to(model.device)).logits[:, :-1]
            targets = labels_BT[:, 1:].reshape(-1).to(model.device)
            loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets, reduction="sum") / num_tokens
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            elapsed_s = time.monotonic() - start
            logger.info("step %d  loss %.4f  %.0f s", step + 1, sum(losses), elapsed_s)


def main() -> None:
    """Parse the arguments, warm up, and save model and tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE / "base_model")
    parser.add_argument("--num-steps", type=int, default=700, help="supervised steps")
    parser.add_argument("--lr", type=float, default=2.5e-3, help="peak learning rate")
    parser.add_argument("--mistakes", type=float, default=0.45, help="careless mistakes per column")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and demonstrations")
    parser.add_argument("--num-threads", type=int, default=2, help="torch threads")
    parser.add_argument("--hidden-size", type=int, default=128, help="width, a multiple of 64")
    parser.add_argument("--num-layers", type=int, default=4, help="decoder layers")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(args.num_threads)
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, args.hidden_size, args.num_layers).to(args.device)
    train(
        model,
        tokenizer,
        num_steps=args.num_steps,
        peak_lr=args.lr,
        mistakes=args.mistakes,
        seed=args.seed,
    )
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main()
