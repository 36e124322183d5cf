"""Tiny random models of many families, as their checkpoints are, and how each is changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.tiny_model import make_tokenizer

_SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
_PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75}
_GEMMA3 = {
    "query_pre_attn_scalar": 32,
    "sliding_window": 16,
    "hidden_activation": "gelu_pytorch_tanh",
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_SHARED_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_MLA = {  # the sizes are those that vLLM's kernels have, on CPU and on GPUs
    **_SHARED_EXPERTS,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
    "num_key_value_heads": 2,
    "rope_parameters": {**_YARN_ROPE, "mscale": 0.707, "mscale_all_dim": 0.707},
}

FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "Qwen3": ("Qwen3", {}),
    "Qwen3 with YaRN": ("Qwen3", {"rope_parameters": _YARN_ROPE}),
    "Llama with linear RoPE": ("Llama", {"rope_parameters": _LINEAR_ROPE}),
    "Llama 3.x": ("Llama", {"rope_parameters": _LLAMA3_ROPE}),
    "Llama with biases, tied": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "Mistral": ("Mistral", {"sliding_window": 16}),
    "Gemma 1": ("Gemma", {"tie_word_embeddings": True}),
    "Gemma 2": ("Gemma2", {"tie_word_embeddings": True, **_GEMMA3}),
    "Gemma 3 (text)": (
        "Gemma3Text:Gemma3",
        {
            "tie_word_embeddings": True,
            "num_hidden_layers": 3,
            "sliding_window_pattern": 3,
            **_GEMMA3,
        },
    ),
    "Phi-3, Phi-4": ("Phi3", {"sliding_window": None}),
    "Phi-4-mini": ("Phi3", {"sliding_window": 16, "rope_parameters": _PARTIAL_ROPE}),
    "OLMo-2": ("Olmo2", {}),
    "OLMo-3": ("Olmo3", {"sliding_window": 16}),
    "GLM-4 (9B, 32B)": ("Glm4", {"attention_bias": True}),
    "GLM (edge)": ("Glm", {"attention_bias": True}),
    "SmolLM3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "Granite": ("Granite", {"logits_scaling": 1.0, "residual_multiplier": 0.5}),
    "Qwen3-MoE": ("Qwen3Moe", {**_MOE, "norm_topk_prob": True}),
    "Qwen3-MoE, 30B-like": (
        "Qwen3Moe",
        {**_MOE, "num_experts": 8, "moe_intermediate_size": 48, "mlp_only_layers": [0]},
    ),
    "Qwen2-MoE": ("Qwen2Moe", {**_MOE, "shared_expert_intermediate_size": 64}),
    "Mixtral": ("Mixtral", {"num_local_experts": 4}),
    "OLMoE": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "DeepSeek-V2": ("DeepseekV2", {**_MLA, "topk_method": "greedy"}),
    "DeepSeek-V3": (
        "DeepseekV3",
        {
            **_MLA,
            "q_lora_rank": 48,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
        },
    ),
    "GLM-4.5 (MoE)": ("Glm4Moe", {**_SHARED_EXPERTS, "use_qk_norm": True, "attention_bias": True}),
    "gpt-oss": (
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    ),
}


def architecture_of(name: str) -> str:
    """The class that a family's checkpoints name."""
    config_stem, _, model_stem = FAMILIES[name][0].partition(":")
    return f"{model_stem or config_stem}ForCausalLM"


def has_latent_attention(name: str) -> bool:
    """Whether keys and values are products of a latent vector (DeepSeek's MLA)."""
    return "kv_lora_rank" in FAMILIES[name][1]


def make_family(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a tiny random model of a family, without a tokenizer, and return `folder`."""
    import torch
    import transformers

    stem, options = FAMILIES[name]
    config_class = getattr(transformers, f"{stem.partition(':')[0]}Config")
    model_class = getattr(transformers, architecture_of(name))
    torch.manual_seed(seed)
    model = model_class(config_class(**{**_SMALL, **options})).to(torch.float32)
    disturb(model, 0.05)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.5)
    make_tokenizer(folder)
    model.config.dtype = "float32"
    model.save_pretrained(folder)
    return folder


def disturb(model: Any, size: float) -> None:
    """Move every parameter, norms, biases and routers too, as an optimizer step does."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn_like(parameter))
