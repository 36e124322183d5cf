"""One YAML file -> the settings of a run, checked as far as that is possible without a cluster.

Everything wrong is a `ConfigError` that names the dotted key: unknown and duplicate keys, types,
missing files, a model folder without a model, a reward function that is not there. Reading is all
that happens here; importing this module loads neither ray, torch nor vllm.
"""

from __future__ import annotations

import dataclasses
import logging
import time
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from ray_apr.cli.prompt_files import PromptFile, PromptsSettings, Suites, prompts_of, suites_of
from ray_apr.cli.sections import RaySettings, RunFolderSettings, ScalingSettings
from ray_apr.cli.user_files import check_code
from ray_apr.config import (
    AlgorithmConfig,
    BufferConfig,
    EvaluationConfig,
    Mode,
    PartialRolloutConfig,
    RolloutConfig,
    Sections,
    TrainConfig,
)
from ray_apr.config.renamed import renew, renew_key
from ray_apr.config.trackers import TrackersConfig
from ray_apr.config.yaml import as_mapping, check_section, read_yaml, section_of, set_override
from ray_apr.core.exceptions import ConfigError, UnknownKeyError
from ray_apr.core.names import OTHER_NAMES, nearest
from ray_apr.run.command import Command
from ray_apr.run.folder import run_folder
from ray_apr.run.model import check_model

logger = logging.getLogger(__name__)


_SECTIONS: Mapping[str, type] = {
    "rollout": RolloutConfig,
    "partial_rollout": PartialRolloutConfig,
    "buffer": BufferConfig,
    "algorithm": AlgorithmConfig,
    "train": TrainConfig,
    "scaling": ScalingSettings,
    "run": RunFolderSettings,
    "trackers": TrackersConfig,
    "ray": RaySettings,
}
_PRESET_SECTIONS = ("partial_rollout", "algorithm")
"""Sections whose defaults depend on a preset."""
_REQUIRED = ("model", "prompts")
_CODE = ("reward", "environment", "group_filter")
_SUITE = "suite"
"""Column that names the suite of a held-out prompt, where none is given."""
_KEYS = ("mode", *_REQUIRED, *_CODE, *_SECTIONS, "evaluation")


@dataclass(frozen=True, kw_only=True)
class RunSettings(Sections):
    """What a settings file says; code is named here, and imported for the run's `RunSpec`."""

    path: Path
    """The YAML file; relative names in it are relative to its folder."""
    command: Command
    """What the run folder keeps of them."""
    model: str
    """Absolute path of a model folder, or a hub id ``owner/name``."""
    prompts: PromptsSettings
    """With absolute paths."""
    reward: str | None
    """``package.module:function``, or ``file.py:function`` relative to the YAML file."""
    environment: str | None
    """``package.module:Class``, or ``file.py:Class`` relative to the YAML file."""
    group_filter: str | None
    """Like `reward`."""
    evaluation_prompts: PromptFile | Suites | None
    """With absolute paths; what is evaluated."""
    evaluation_rewards: Mapping[str, str]
    """Functions of the user's in ``evaluation.rewards``."""
    objective: Mapping[str, Any]
    """Functions of the user's in the places of ``algorithm.advantage``, ``loss`` and
    ``correction``, and their further arguments."""
    scheduling: Mapping[str, str]
    """Code of the user's in the places of ``partial_rollout.admission`` and ``resume_order``."""
    scaling: ScalingSettings
    run: RunFolderSettings
    trackers: TrackersConfig
    ray: RaySettings

    @property
    def mode(self) -> str:
        """Name of the preset."""
        return self.partial_rollout.mode

    @property
    def base_dir(self) -> Path:
        """Folder of the YAML file."""
        return self.path.parent

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return run_folder(self.run.storage_path, self.run.name or "")


def load_settings(
    path: str | Path, overrides: Sequence[str] = (), *, now_s: float | None = None
) -> RunSettings:
    """Read a YAML file, apply overrides, and check all of it.

    Args:
        path: The YAML file.
        overrides: ``"train.steps=10"``, ``"mode=sync"``: dotted key and YAML value.
        now_s: Unix time of the name of a run that is given none; None takes the clock.

    Raises:
        ConfigError: Names the key that is wrong, its value and the remedy.

    Example:
        >>> load_settings("my.yaml", ["train.steps=10"])  # doctest: +SKIP
    """
    path = Path(path).expanduser().resolve()
    values = read_yaml(path)
    if isinstance(values.get("rollout"), Mapping):
        values["rollout"] = renew(values["rollout"], logger.warning)
    for text in overrides:
        key, equals, value = text.partition("=")
        set_override(values, renew_key(key.strip(), logger.warning) + equals + value)
    if isinstance(values.get("rollout"), Mapping):  # a whole section may be set
        values["rollout"] = renew(values["rollout"], logger.warning)
    for key in values:
        if key not in _KEYS:
            raise UnknownKeyError(str(key), values[key], _KEYS, _meant(str(key), _KEYS))
    for key in _REQUIRED:
        if values.get(key) is None:
            raise ConfigError(key, None, f"is missing; add `{key}: ...` to {path.name}")
    if values.get("reward") is None and values.get("environment") is None:
        remedy = f"is missing; add `reward: file.py:function` to {path.name}"
        raise ConfigError("reward", None, remedy)
    try:
        return _build(path, values, now_s, Command.of(path, overrides))
    except UnknownKeyError as error:
        places = _meant(error.field.rpartition(".")[2], error.known)
        raise UnknownKeyError(error.field, error.value, error.known, places) from None


def _meant(name: str, known: Sequence[str]) -> list[str]:
    """Dotted names of the settings that are called so, in whatever section; of those that are
    called nearly so, where none of the section's own, `known`, is."""
    places = _places()
    if meant := OTHER_NAMES.get(name):
        return [] if meant in known else places.get(meant, [])
    if name not in places and not nearest(name, known):
        return [place for near in nearest(name, list(places))[:1] for place in places[near]]
    return places.get(name, [])


def _places() -> dict[str, list[str]]:
    """Dotted names of all settings, by their last part."""

    def walk(section: str, cls: type) -> Iterator[str]:
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            yield f"{section}.{field.name}"
            if get_origin(hints[field.name]) is Mapping:  # of names that the user gives
                continue
            for hint in (hints[field.name], *get_args(hints[field.name])):
                if isinstance(hint, type) and dataclasses.is_dataclass(hint):
                    yield from walk(f"{section}.{field.name}", hint)

    tables = {"prompts": PromptsSettings, **_SECTIONS, "evaluation": EvaluationConfig}
    places = {name: [f"{name} at the top level"] for name in _KEYS}
    for place in (place for section, cls in tables.items() for place in walk(section, cls)):
        if place != "partial_rollout.mode":  # is that of the top
            places.setdefault(place.rpartition(".")[2], []).append(place)
    return places


def _build(
    path: Path, values: Mapping[str, Any], now_s: float | None, command: Command
) -> RunSettings:
    sections = {
        name: section_of(name, cls, values.get(name))
        for name, cls in _SECTIONS.items()
        if name not in _PRESET_SECTIONS
    }
    sections["partial_rollout"], rules = _partial_rollout(values, path.parent)
    sections["algorithm"], objective = _algorithm(values.get("algorithm"), path.parent)
    column = sections["rollout"].prompt_column
    evaluation, held_out, rewards = _evaluation(values, path.parent, column)
    code = {name: values[name] for name in _CODE if values.get(name) is not None}
    for name, value in {"model": values["model"], **code}.items():
        if not isinstance(value, str):
            raise ConfigError(name, value, "must be text")
    code = {name: check_code(name, spec, path.parent) for name, spec in code.items()}
    factory = sections["rollout"].engine.factory
    if factory != "vllm":
        check_code("rollout.engine.factory", factory, path.parent)
    if ":" in sections["train"].weight_transport:
        check_code("train.weight_transport", sections["train"].weight_transport, path.parent)
    prompts = prompts_of(values["prompts"], path.parent, column)
    if sections["run"].name is None:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now_s))
        name = f"{path.stem}-{sections['partial_rollout'].mode}-{stamp}"
        sections["run"] = dataclasses.replace(sections["run"], name=name)
    settings = RunSettings(
        path=path,
        command=command,
        model=check_model(values["model"], path.parent),
        prompts=prompts,
        reward=code.get("reward"),
        environment=code.get("environment"),
        group_filter=code.get("group_filter"),
        evaluation=evaluation,
        evaluation_prompts=held_out,
        evaluation_rewards=rewards,
        objective=objective,
        scheduling=rules,
        **sections,
    )
    settings.check(settings.scaling)
    return settings


def _of_user(*args: Any, **kwargs: Any) -> Any:
    """Stands for code that the file names and that is not imported yet."""


def _partial_rollout(
    values: Mapping[str, Any], base_dir: Path
) -> tuple[PartialRolloutConfig, dict[str, str]]:
    """The section, and the rules of the user's that it names."""
    section = as_mapping("partial_rollout", values.get("partial_rollout"))
    if "mode" in section:
        raise ConfigError(
            "partial_rollout.mode", section["mode"], "write `mode:` at the top level instead"
        )
    rules = _take_code("partial_rollout", ("admission", "resume_order"), section, base_dir)
    check_section("partial_rollout", PartialRolloutConfig, section)
    mode = values.get("mode", "apr")
    if not isinstance(mode, str):
        raise ConfigError("mode", mode, f"must be one of {', '.join(get_args(Mode))}")
    return PartialRolloutConfig.preset(mode, **section), rules


def _take_code(
    name: str, keys: Sequence[str], section: dict[str, Any], base_dir: Path
) -> dict[str, str]:
    """Take what names code of the user's out of a section, once it was found."""
    code = {k: v for k in keys if isinstance(v := section.get(k), str) and ":" in v}
    for key, spec in code.items():
        check_code(f"{name}.{key}", spec, base_dir)
        del section[key]
    return code


def _algorithm(given: Any, base_dir: Path) -> tuple[AlgorithmConfig, dict[str, Any]]:
    """The section, with stand-ins for functions of the user's; and these, with their arguments."""
    section = as_mapping("algorithm", given)
    preset = section.pop("preset", None)
    named = _take_code("algorithm", ("advantage", "loss", "correction"), section, base_dir)
    given_by_name = {f"{key}_kwargs" for key in named} & section.keys()
    objective = {**named, **{key: section.pop(key) for key in given_by_name}}
    check_section("algorithm", AlgorithmConfig, section)
    section |= dict.fromkeys(named, _of_user)
    if preset is None:
        return AlgorithmConfig(**section), objective
    return AlgorithmConfig.preset(preset, **section), objective


def _evaluation(
    values: Mapping[str, Any], base_dir: Path, column: str
) -> tuple[EvaluationConfig | None, PromptFile | Suites | None, dict[str, str]]:
    """The section, the held-out prompts that it names, and code for the rewards of their suites."""
    if values.get("evaluation") is None:
        return None, None, {}
    section = as_mapping("evaluation", values["evaluation"])
    given = section.pop("prompts", None)
    if given is None:
        raise ConfigError("evaluation.prompts", None, "is missing; name the held-out prompts' file")
    rewards = as_mapping("evaluation.rewards", section.pop("rewards", None))
    suites = as_mapping("evaluation.suites", section.pop("suites", None))
    config: EvaluationConfig = section_of("evaluation", EvaluationConfig, section)
    held_out = suites_of(given, base_dir, column, config.suite_column or _SUITE)
    if isinstance(held_out, Suites):
        config = dataclasses.replace(config, suite_column=held_out.column)
    config = dataclasses.replace(config, suites=suites)
    dataclasses.replace(config, rewards=dict.fromkeys(rewards, _of_user))  # which checks the names
    for suite, spec in rewards.items():
        name = f"evaluation.rewards.{suite}"
        if not isinstance(spec, str):
            raise ConfigError(name, spec, 'must be text: "package.module:name" or "file.py:name"')
        check_code(name, spec, base_dir)
    return config, held_out, rewards
