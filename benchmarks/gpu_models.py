"""Models with random weights of real shapes: fine for speed, and no hub is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_BASE = ROOT / "examples/arithmetic/base_model"
VOCABULARY = 151_936

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
    "0.1B": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12,
             "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64},
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
             "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
             "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
           "tie_word_embeddings": False},
}  # fmt: skip
"""Those of Qwen3, whose embeddings are tied below 8B; `tiny` and `0.1B` are for a CPU."""


def make_model(shape: str, folder: Path, *, context: int, dtype: str = "bfloat16") -> Path:
    """Write a model and a tokenizer of its vocabulary; returns the folder.

    Args:
        shape: A key of `SHAPES`.
        folder: Where to; must not exist.
        context: Longest prompt + response, in tokens.
        dtype: Data type of the weights.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

    config = Qwen3Config(
        vocab_size=512 if shape == "tiny" else VOCABULARY,
        max_position_embeddings=context,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **{"tie_word_embeddings": True, **SHAPES[shape]},
    )
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()  # the GPU belongs to what is measured
    AutoTokenizer.from_pretrained(_BASE).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return folder
