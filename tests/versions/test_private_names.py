"""Private names of Ray, PyTorch, Transformers and vLLM against the versions that are installed.

A name that is listed here as missing has gone or moved: see what took its place, change the adapter
that its table is in, and the versions that it is tested with.
"""

from __future__ import annotations

import ast
import datetime
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ray_apr import serve
from ray_apr.compat import flash_attention as flash_private
from ray_apr.compat import lookup as private
from ray_apr.compat import ray as ray_private
from ray_apr.compat import rllib as rllib_private
from ray_apr.compat import torch as torch_private
from ray_apr.compat import transformers as transformers_private
from ray_apr.core.architectures import CPU_HEADS
from ray_apr.core.exceptions import APRError, PrivateNameError
from ray_apr.core.imports import installed_version
from ray_apr.serve.vllm import private as vllm_private
from tests.versions.sources import missing


def test_ray_has_what_is_used_of_its_inside():
    assert missing(ray_private.RAY) == []


def test_rllib_has_what_is_used_of_its_inside():
    assert missing(rllib_private.RLLIB) == []


def test_what_is_used_of_ray_can_be_imported_where_cupy_is():
    for name in ray_private.RAY.names:
        try:
            assert ray_private.RAY.get(name) is not None
        except PrivateNameError:
            raise
        except ImportError as error:
            assert "cupy" in str(error).lower(), name


def test_vllm_has_what_is_used_of_its_inside():
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    assert missing(vllm_private.VLLM) == []


def test_flash_attention_has_what_is_used_of_its_inside():
    if installed_version(flash_private.PACKAGE) is None:
        pytest.skip("flash-attn-4 is not installed")
    assert missing(flash_private.FLASH_ATTENTION) == []


def test_vllm_computes_the_heads_on_cpu_that_are_taken():
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    source = (Path(spec.origin).parent / "v1/attention/backends/cpu_attn.py").read_text()
    told = re.search(r"def get_supported_head_sizes.*?return \[([\d, ]+)\]", source, re.DOTALL)
    assert told is not None
    assert tuple(map(int, told[1].split(","))) == CPU_HEADS


PUBLIC = {"AsyncEngineArgs", "RequestOutputKind", "SamplingParams", "WeightTransferConfig"}
"""Names of vLLM that it documents."""
ASKED_FOR = {"update_weight_version"}
"""Members of AsyncLLM that the adapter does without where there are none."""


def of_serve() -> Iterator[ast.AST]:
    for file in sorted(Path(serve.__file__).parent.rglob("*.py")):
        yield from ast.walk(ast.parse(file.read_text(encoding="utf-8")))


def test_the_table_of_vllm_has_all_that_is_imported():
    """Some were imported past the table: `make check-versions` would not have missed them."""
    imported = {
        alias.name
        for node in of_serve()
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm"
        for alias in node.names
    }
    assert imported - PUBLIC - vllm_private.VLLM.names.keys() == set()


def test_the_table_of_vllm_has_all_that_is_used_of_its_engine():
    used = {
        node.attr
        for node in of_serve()
        if isinstance(node, ast.Attribute)
        and ("llm" in (getattr(node.value, "attr", None), getattr(node.value, "id", None)))
    }
    listed = set(re.findall(r"(\w+)(?:\(|\s|$)", vllm_private.VLLM.members["AsyncLLM"]))
    assert {"output_handler", "add_request"} <= used <= listed | ASKED_FOR


def test_an_attribute_that_is_set_at_the_start_is_a_member():
    names = private.PrivateNames(
        distributions=("pytest",),
        tested="1.0",
        names={"Session": "_pytest.main"},
        members={"Session": "testsfailed never_set"},
    )
    assert missing(names) == ["_pytest.main.Session.never_set"]


def test_transformers_has_what_is_used_of_its_inside():
    assert missing(transformers_private.TRANSFORMERS) == []


def test_torch_has_what_is_used_of_its_inside():
    for name, members in torch_private.TORCH.members.items():
        found = torch_private.TORCH.get(name)
        assert [m for m in members.split() if not hasattr(found, m)] == [], name
    for name in torch_private.TORCH.names:
        assert torch_private.TORCH.get(name) is not None
    device = torch.distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    torch_private.gloo_options(datetime.timedelta(seconds=1), [device])


def test_a_fused_optimizer_leaves_a_step_out_that_found_infinities():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    weight.grad = torch.full((3,), 4.0)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(1.0)
    optimizer.step()
    assert weight.tolist() == [1.0] * 3
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    assert weight.tolist() != [1.0] * 3
    assert weight.grad.tolist() == [2.0] * 3, "divided by the scale"


def test_a_name_that_has_gone_says_so_and_which_versions_had_it():
    names = private.PrivateNames(
        distributions=("pytest",), tested="1.0", names={"gone": "pytest"}, members={"gone": "x"}
    )
    with pytest.raises(
        PrivateNameError, match=r"pytest \d+\S* has no gone .* tested with pytest 1"
    ):
        names.get("gone")
    assert missing(names) == ["pytest.gone"]
    assert issubclass(PrivateNameError, APRError)
    with pytest.raises(AttributeError):
        names.get("other")
