"""Which models can be trained: an architecture is known to be right, or refused with a reason.

What a table of architectures guards against is silent: an engine that computes something else than
the trainer, after a weight sync or from the start, still answers. `SUPPORTED` has those that were
taken through trainer, syncs, engine and export (docs/architectures.md has the figures); everything
else is refused before anything starts. Pure: what is judged is a ``config.json``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ray_apr.core.exceptions import ConfigError

SUPPORTED: Mapping[str, str] = {
    "DeepseekV2ForCausalLM": "DeepSeek-V2",
    "DeepseekV3ForCausalLM": "DeepSeek-V3",
    "Gemma3ForCausalLM": "Gemma 3 (text)",
    "GemmaForCausalLM": "Gemma",
    "Glm4ForCausalLM": "GLM-4-0414",
    "Glm4MoeForCausalLM": "GLM-4.5",
    "GlmForCausalLM": "GLM-4, GLM-Edge",
    "LlamaForCausalLM": "Llama, SmolLM2",
    "MistralForCausalLM": "Mistral",
    "MixtralForCausalLM": "Mixtral",
    "Olmo2ForCausalLM": "OLMo-2",
    "Olmo3ForCausalLM": "OLMo-3",
    "OlmoeForCausalLM": "OLMoE",
    "Phi3ForCausalLM": "Phi-3, Phi-4",
    "Qwen2ForCausalLM": "Qwen2, Qwen2.5",
    "Qwen2MoeForCausalLM": "Qwen1.5-MoE, Qwen2-MoE",
    "Qwen3ForCausalLM": "Qwen3",
    "Qwen3MoeForCausalLM": "Qwen3-MoE",
    "SmolLM3ForCausalLM": "SmolLM3",
}
"""Architecture -> its models."""

_CAPS = "it squashes attention scores and logits by tanh, which the trainer does not compute"
_SCALES = "it scales its logits after the head, which the trainer does not compute"
_STATE = (
    "its layers hand a state from token to token, which would leak between the samples of a packed "
    "row"
)

REFUSED: Mapping[str, str] = {
    "BambaForCausalLM": _STATE,
    "Cohere2ForCausalLM": _SCALES,
    "CohereForCausalLM": _SCALES,
    "FalconH1ForCausalLM": _STATE,
    "FalconMambaForCausalLM": _STATE,
    "Gemma2ForCausalLM": _CAPS,
    "GptOssForCausalLM": (
        "its attention has sinks, which the trainer's does not compute, and its checkpoints are "
        "quantised"
    ),
    "GraniteForCausalLM": _SCALES,
    "GraniteMoeForCausalLM": _SCALES,
    "GraniteMoeHybridForCausalLM": _STATE,
    "JambaForCausalLM": _STATE,
    "Lfm2ForCausalLM": _STATE,
    "Lfm2MoeForCausalLM": _STATE,
    "Mamba2ForCausalLM": _STATE,
    "MambaForCausalLM": _STATE,
    "NemotronHForCausalLM": _STATE,
    "Qwen3NextForCausalLM": _STATE,
    "Qwen3_5ForCausalLM": _STATE,
    "Qwen3_5MoeForCausalLM": _STATE,
    "Zamba2ForCausalLM": _STATE,
}
"""Architecture -> why it cannot be trained."""

_CHANGED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Settings that change logits after the head."""
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that do not depend on how long a row or the context is."""
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of a head that vLLM's attention has on CPU. With another one an engine starts, and dies at
its first request, which looks as if the prompt were the cause."""
_OWN_HEADS = ("Gemma3", "Gemma", "Glm4", "Glm", "Qwen3")
"""Architectures whose heads have 128 or 256 where ``config.json`` says nothing of them."""
_OTHER_INPUTS = ("vision_config", "audio_config", "image_token_id", "audio_token_id")


def read_config(model: str, folder: Path) -> Mapping[str, Any]:
    """Return the ``config.json`` of a model's folder, if the model can be trained.

    Args:
        model: As the user named it.
        folder: Where it is.

    Raises:
        ConfigError: If there is none, or it cannot be trained.
    """
    file = folder / "config.json"
    if not file.is_file():
        remedy = f"{folder} holds no config.json, so no Hugging Face model; make it"
        raise ConfigError("model", model, remedy)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError("model", model, f"{file} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError("model", model, f"{file} holds no settings; save the model again")
    check_config(model, config)
    return config


def check_config(model: str, config: Mapping[str, Any]) -> None:
    """Refuse a model that cannot be trained, or that nobody has tried.

    Args:
        model: As the user named it.
        config: What its ``config.json`` holds.

    Raises:
        ConfigError: If it is refused; says why.
    """
    reason = _reason(config)
    if reason is not None:
        raise ConfigError("model", model, reason)


def check_on_cpu(model: str, config: Mapping[str, Any]) -> None:
    """Refuse a model that vLLM does not compute on CPU.

    Args:
        model: As the user named it.
        config: What its ``config.json`` holds, which `check_config` has passed.

    Raises:
        ConfigError: If the size of its heads is none of vLLM's there.
    """
    if config.get("kv_lora_rank"):  # latent attention has kernels of its own
        return
    of_family = [f"{name}ForCausalLM" for name in _OWN_HEADS]
    if "head_dim" not in config and set(of_family) & set(config["architectures"]):
        return
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    size = config.get("head_dim") or (hidden // heads if hidden and heads else None)
    if size is not None and size not in CPU_HEADS:
        remedy = (
            f"its heads have a size of {size}, which vLLM does not compute on CPU, where "
            f"it has {', '.join(map(str, CPU_HEADS))}; choose another model, or run it on GPUs"
        )
        raise ConfigError("model", model, remedy)


def check_divides(config: Mapping[str, Any], num_gpus: int) -> None:
    """Refuse a number of GPUs for each engine by which vLLM does not divide a model's heads.

    Args:
        config: What its ``config.json`` holds.
        num_gpus: Of an engine.

    Raises:
        ConfigError: If there is a rest.
    """
    heads, of_keys = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if config.get("kv_lora_rank"):  # latent attention has its keys on all of them
        of_keys = None
    divides = not heads or heads % num_gpus == 0
    divides &= not of_keys or of_keys % num_gpus == 0 or num_gpus % of_keys == 0
    if not divides:
        of = f"{heads} attention heads" + (f", {of_keys} of keys and values" if of_keys else "")
        remedy = (
            f"does not divide the model's heads, which vLLM spreads over the GPUs of an engine: it "
            f"has {of}; choose a number that does, and more of rollout.num_replicas"
        )
        raise ConfigError("rollout.engine.tensor_parallel_size", num_gpus, remedy)


def _reason(config: Mapping[str, Any]) -> str | None:
    """Why a model is refused; None if it is not."""
    if config.get("quantization_config") or config.get("compression_config"):
        return "its weights are quantised; take the checkpoint in bfloat16 or float32"
    names = config.get("architectures") or []
    if len(names) != 1:
        return (
            f"its config.json names {len(names)} architectures; it must name one, as "
            "save_pretrained of a model does"
        )
    (name,) = names
    if name in REFUSED:
        return f"{name} cannot be trained: {REFUSED[name]}"
    if name not in SUPPORTED:
        return f"{name} {_unknown(name, config)}; choose one of {', '.join(sorted(SUPPORTED))}"
    for setting in _CHANGED_LOGITS:
        if config.get(setting) not in (None, 1, 1.0):
            return f"{setting} = {config[setting]} is not supported; choose a model without it"
    if config.get("use_sliding_window"):
        return "use_sliding_window is not supported: vLLM reads it otherwise than Transformers does"
    for rope in _rope_types(config):
        if rope not in _ROPE_TYPES:
            return (
                f"its rotary embedding of type {rope} is not computed alike by trainer and engine; "
                f"they agree for {', '.join(_ROPE_TYPES)}"
            )
    return None


def _unknown(name: str, config: Mapping[str, Any]) -> str:
    """What is wrong with an architecture that is in no table."""
    if config.get("is_encoder_decoder"):
        return "has an encoder, and only decoders are trained"
    if name.endswith("ForConditionalGeneration") or any(key in config for key in _OTHER_INPUTS):
        return "takes images or audio, and only text is trained"
    if config.get("auto_map"):
        return "is code of its checkpoint, which is not run"
    if not name.endswith("ForCausalLM"):
        return "is no causal language model"
    return "is unknown: nobody has compared the engine with the trainer"


def _rope_types(config: Mapping[str, Any]) -> Iterator[str]:
    """Types of the rotary embeddings, in the spellings of Transformers 4 and 5."""
    for key in ("rope_parameters", "rope_scaling"):
        given = config.get(key)
        if not isinstance(given, Mapping):
            continue
        kinds = [value for value in given.values() if isinstance(value, Mapping)] or [given]
        for kind in kinds:
            yield str(kind.get("rope_type") or kind.get("type") or "default")
