"""A model of about 100,000 parameters with a character tokenizer, made in a second, offline."""

from __future__ import annotations

from pathlib import Path

CHARACTERS = "0123456789+-*=() abcdefghijklmnopqrstuvwxyz?.:;\n"


def make_tiny_model(
    folder: Path,
    *,
    tie: bool = True,
    characters: str = CHARACTERS,
    hidden_size: int = 64,
    num_layers: int = 2,
    max_positions: int = 4096,
    seed: int = 0,
    architecture: str = "qwen3",
    bias: bool = False,
) -> Path:
    """Write a randomly initialised model with its tokenizer to `folder` and return `folder`.

    Args:
        folder: Where to write; made when it is missing.
        tie: Whether the output layer shares the embedding's weights.
        characters: One token each, after the end-of-sequence token (id 0).
        hidden_size: Width of the model.
        num_layers: Transformer blocks.
        max_positions: Longest sequence, in tokens.
        seed: Seed of the weights.
        architecture: ``"qwen3"`` or ``"llama"``.
        bias: Whether a Llama's linear layers have biases, not zero.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    vocabulary_size = make_tokenizer(folder, characters)
    kinds = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
        "llama": (LlamaConfig, LlamaForCausalLM, {"attention_bias": bias, "mlp_bias": bias}),
    }
    config_class, model_class, options = kinds[architecture]
    config = config_class(
        vocab_size=vocabulary_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tie,
        initializer_range=0.1,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=0,
        dtype="float32",
        **options,
    )
    torch.manual_seed(seed)
    model = model_class(config).to(torch.float32)
    if bias:
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return folder


def make_tokenizer(folder: Path, characters: str = CHARACTERS) -> int:
    """Write a tokenizer of characters to `folder`, and return the size of its vocabulary."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {"<eos>": 0} | {c: i + 1 for i, c in enumerate(dict.fromkeys(characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>"
    ).save_pretrained(folder)
    return len(vocabulary)
