"""A plugin of vLLM's: one prompt kills the engine core that it goes into."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_IDS = "RAY_APR_TEST_POISON"
_GROUP = "vllm.general_plugins"


def poisoned(env: dict[str, str], folder: Path, token_ids: Sequence[int]) -> dict[str, str]:
    """An environment in which a prompt of these tokens kills its engine, also once it has some of
    its response.

    Args:
        env: The environment that it is made of.
        folder: Gets what makes the plugin known to vLLM.
        token_ids: Of the prompt.
    """
    known = folder / "apr_poison-1.dist-info"
    known.mkdir(parents=True)
    (known / "METADATA").write_text("Metadata-Version: 2.1\nName: apr_poison\nVersion: 1\n")
    (known / "entry_points.txt").write_text(f"[{_GROUP}]\napr_poison = {__name__}:register\n")
    path = (str(folder), str(Path(__file__).parents[1]), *filter(None, [env.get("PYTHONPATH")]))
    ids = ",".join(map(str, token_ids))
    return {**env, "PYTHONPATH": os.pathsep.join(path), _IDS: ids}


def register() -> None:
    """Have this process die of the prompt, if it is an engine core; vLLM calls it in each one."""
    from vllm.v1.engine.core import EngineCore

    poison = [int(token) for token in os.environ[_IDS].split(",")]
    add_request = EngineCore.add_request

    def add_or_die(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        if list(request.prompt_token_ids[: len(poison)]) == poison:
            os.kill(os.getpid(), signal.SIGKILL)
        add_request(self, request, *args, **kwargs)

    EngineCore.add_request = add_or_die
