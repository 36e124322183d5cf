"""Which models are trained, and which are refused by name (architectures.py)."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from ray_apr.core.architectures import REFUSED, SUPPORTED, check_config, read_config
from ray_apr.core.exceptions import ConfigError
from ray_apr.run.model import check_hub_model, check_model
from tests.families import FAMILIES, architecture_of, make_family

ROOT = Path(__file__).resolve().parents[2]
QWEN3 = {"architectures": ["Qwen3ForCausalLM"]}


@pytest.mark.parametrize("name", SUPPORTED)
def test_what_is_supported_is_taken(name):
    check_config("m", {"architectures": [name]})


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_by_name_and_with_a_reason(name):
    with pytest.raises(ConfigError, match=f"{name} cannot be trained: it"):
        check_config("m", {"architectures": [name]})


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"architectures": ["NewForCausalLM"]}, r"NewForCausalLM is unknown.*Qwen3ForCausalLM"),
        ({}, "names 0 architectures"),
        ({"architectures": ["A", "B"]}, "names 2 architectures"),
        ({**QWEN3, "quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"architectures": ["Qwen2_5_VLForConditionalGeneration"]}, "takes images or audio"),
        ({"architectures": ["PhiVisionForCausalLM"], "vision_config": {}}, "takes images or audio"),
        (
            {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
            "has an encoder",
        ),
        (
            {"architectures": ["MineForCausalLM"], "auto_map": {"AutoModelForCausalLM": "m.M"}},
            "code of its checkpoint",
        ),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "no causal language model"),
        ({**QWEN3, "final_logit_softcapping": 30.0}, "final_logit_softcapping = 30"),
        ({**QWEN3, "use_sliding_window": True}, "use_sliding_window is not supported"),
        ({**QWEN3, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "of type dynamic"),
        ({**QWEN3, "rope_parameters": {"rope_type": "longrope"}}, "of type longrope"),
        (
            {**QWEN3, "rope_parameters": {"full_attention": {"rope_type": "longrope"}}},
            "of type longrope",
        ),
    ],
)
def test_what_cannot_be_made_right_is_refused(config, match):
    with pytest.raises(ConfigError, match=match):
        check_config("m", config)


def test_code_beside_a_known_architecture_is_not_run_and_does_not_matter():
    check_config("m", {"architectures": ["Phi3ForCausalLM"], "auto_map": {"AutoConfig": "c.C"}})
    check_config("m", {**QWEN3, "rope_scaling": {"rope_type": "yarn"}, "logits_scaling": 1})


@pytest.mark.parametrize(
    ("text", "match"), [(None, "no config.json"), ("{", "no JSON"), ("[]", "holds no settings")]
)
def test_a_folder_without_a_readable_config_is_refused(tmp_path, text, match):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=match):
        read_config("m", tmp_path)


def test_the_yaml_s_model_is_checked_before_a_run_begins(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GptOssForCausalLM"]}))
    with pytest.raises(ConfigError, match="has sinks"):
        check_model(str(tmp_path), tmp_path)


def test_a_hub_id_s_model_is_checked_before_its_engines_start(monkeypatch):
    configs = {"a/b": {"architectures": ["Gemma2ForCausalLM"]}, "a/c": QWEN3}
    monkeypatch.setattr(
        "transformers.PretrainedConfig.get_config_dict", lambda model, **_: (configs[model], {})
    )
    with pytest.raises(ConfigError, match="Gemma2ForCausalLM cannot be trained"):
        check_hub_model("a/b")
    check_hub_model("a/c")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_the_trials_is_in_a_table(tmp_path, family):
    config = json.loads((make_family(family, tmp_path) / "config.json").read_text())
    assert config["architectures"] == [architecture_of(family)]
    assert (architecture_of(family) in SUPPORTED) != (architecture_of(family) in REFUSED)


def test_every_architecture_that_is_supported_was_tried():
    assert set(SUPPORTED) <= {architecture_of(family) for family in FAMILIES}


def test_the_docs_show_what_was_measured_and_every_family_passed(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    trials = importlib.import_module("architectures")
    results = trials.known_results()
    assert list(results) == ["cpu", "cuda"]
    for result in results.values():
        assert list(result["families"]) == list(FAMILIES)
        assert all(trials.passed(found) for found in result["families"].values())
    assert trials.tables(results) in trials.DOCS.read_text()
