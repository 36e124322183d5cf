"""Write prompts of two Reasoning Gym tasks, and a small random model to try the path with.

Needs the package: ``pip install 'ray_apr[rewards-gym]'``
Run: ``python examples/reasoning_gym/make_task.py``
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

logger = logging.getLogger(__name__)

HERE = Path(__file__).resolve().parent
TASKS = ("chain_sum", "spell_backward")
INSTRUCTION = "\nGive the answer between <answer> and </answer>.\n"


def make_rows(num_rows: int, seed: int) -> list[dict[str, str]]:
    """Prompts of all tasks, each with its `task` and the `entry` that its scorer reads."""
    import reasoning_gym

    return [
        {"prompt": entry["question"] + INSTRUCTION, "task": task, "entry": json.dumps(entry)}
        for task in TASKS
        for entry in reasoning_gym.create_dataset(task, size=num_rows // len(TASKS), seed=seed)
    ]


def make_model(folder: Path) -> None:
    """A random Qwen3 of 0.1M parameters whose tokens are bytes; it knows nothing."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary = {"<eos>": 0}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[byte] = len(vocabulary)
    tokenizer: Any = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>"
    ).save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=1024,
        tie_word_embeddings=True, eos_token_id=0, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).float().save_pretrained(folder)


def main() -> None:
    """Parse the arguments and write the files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--num-rows", type=int, default=512, help="number of prompts")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of both")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    rows = make_rows(args.num_rows, args.seed)
    pq.write_table(pa.Table.from_pylist(rows), args.out / "prompts.parquet", compression="zstd")
    make_model(args.out / "base_model")
    logger.info("%d prompts of %s", len(rows), " and ".join(TASKS))


if __name__ == "__main__":
    main()
