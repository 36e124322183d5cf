"""All settings, read in the code: ``python -m tests.settings > docs/settings.md``.

Names, types and defaults are those of the dataclasses that a YAML file fills; what a setting is for
is the docstring of its field; bounds and further rules are those of the checks in `__post_init__`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from ray_apr.cli import settings
from ray_apr.config import EvaluationConfig, sections
from ray_apr.config.engine_options import TUNES

Reader = tuple[type, str]
"""A dataclass, and the dotted name of its section."""

PAGE = """\
# Settings

Every setting of a run, as a YAML file has them. `python -m tests.settings > docs/settings.md` reads
this page in the code, and a test refuses another one. `--set a.b=c` replaces one on the command
line. In Python the sections are classes with the same fields: `rollout:` is `RolloutConfig`, given
as `APRTrainer(rollout_config=...)` ([all of them](#in-python)); `null` is `None`.

A setting that is wrong, or that would not be obeyed, is refused before anything starts, with a
remedy ([troubleshooting](troubleshooting.md)). "Refused unless" has what is checked beside the
values of the table; … stands for what depends on the run.

"""
IN_PYTHON = """\
## In Python

| section | class | argument of `APRTrainer` |
| --- | --- | --- |
"""
ARGUMENTS = {
    "prompts": (
        "a Ray Dataset, or `PromptRows`; `PromptsConfig`",
        "`prompts`, `evaluation_prompts`; `prompts_config`",
    ),
    "scaling": ("`ray.train.ScalingConfig`", "`scaling_config`"),
    "run": ("`ray.train.RunConfig`", "`run_config`"),
    "ray": ("", "none: call `ray_apr.init()` before"),
    "mode": ("", "`partial_rollout_config=PartialRolloutConfig.preset(mode, ...)`"),
}
MODES = ", ".join(f"`{name}`" for name in get_args(settings.Mode))
A_FILE = "a file, or a [section](#prompts)"
TOP = {
    "mode": (
        MODES,
        "`apr`",
        "A preset of [partial_rollout](#partial_rollout) ([modes](modes.md)).",
    ),
    "model": (
        "text",
        "required",
        "Folder in Hugging Face's format, relative to the YAML file, or a hub id `owner/name` "
        "([models](architectures.md)).",
    ),
    "prompts": (
        "a file, a list of files, or a [section](#prompts)",
        "required",
        "Where the prompts come from ([prompts](prompts.md)).",
    ),
}
"""Settings of the whole file that are told in other words than in the code."""
FURTHER = {
    "algorithm": ("preset", "a name", "`null`", "Settings of a published objective, of which those "
                  "that are given replace single ones ([objectives](objectives.md#presets))."),
    "evaluation": ("prompts", A_FILE, "required", "The held-out prompts."),
}  # fmt: skip
"""What a section of a YAML file has beside the fields of its class."""
ELSEWHERE = ("partial_rollout.mode",)
"""Fields that a YAML file has elsewhere."""
HEAD = "| setting | value | default | what it is for |\n| --- | --- | --- | --- |\n"
CODE = re.compile(r"``([^`]+)``")
LINK = re.compile(r"docs/(\w+)\.md")
RULES = ("at_least", "positive", "whole_or_none", "require", "_require_at_least")


def sections_of_yaml() -> Iterator[Reader]:
    """The sections, each followed by those inside of it."""
    tables = {
        "prompts": settings.PromptsSettings,
        **settings._SECTIONS,
        "evaluation": EvaluationConfig,
    }
    order = ("prompts", "rollout", "partial_rollout", "algorithm", "train", "evaluation")
    names = dict.fromkeys((*order, *tables))
    for name in names:
        yield from with_inner(tables[name], name)


def with_inner(cls: type, name: str) -> Iterator[Reader]:
    """A section and those inside of it."""
    yield cls, name
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        inner = _dataclass_of(hints[field.name])
        if inner is not None:
            yield from with_inner(inner, f"{name}.{field.name}")


def _dataclass_of(hint: Any) -> type | None:
    is_of_several = get_origin(hint) in (Union, types.UnionType, tuple, Mapping)
    options = get_args(hint) if is_of_several else (hint,)
    classes = (one for one in options if isinstance(one, type) and dataclasses.is_dataclass(one))
    return next(classes, None)


def classes_of(cls: type) -> list[type]:
    """The dataclasses whose fields a class has, its own last."""
    return [one for one in reversed(cls.__mro__) if dataclasses.is_dataclass(one)]


def docstrings(cls: type) -> dict[str, str]:
    """What follows each field of a class, and of those that it is made of."""
    pairs = (pair for one in classes_of(cls) for pair in itertools.pairwise(_tree(one).body))
    return {
        ast.unparse(field.target): inspect.cleandoc(ast.literal_eval(text.value))
        for field, text in pairs
        if isinstance(field, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def _tree(thing: Any) -> Any:
    return ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]


class Rules(ast.NodeVisitor):
    """What the checks of a class or function say of each setting, in words."""

    def __init__(self, section: str) -> None:
        self.bounds, self.rules = dict[str, str](), dict[str, list[str]]()
        self.tuples: dict[str, list[str]] = {}
        self.known: dict[str, Any] = {"s": section}
        """What the code has names for."""

    @classmethod
    def of(cls, thing: Any, section: str) -> Rules:
        """Read the code of a class or function."""
        rules = cls(section)
        for one in classes_of(thing) if isinstance(thing, type) else (thing,):
            rules.known = {**vars(sys.modules[one.__module__]), **rules.known}
            rules.visit(_tree(one))
        return rules

    def visit_Assign(self, node: ast.Assign) -> None:
        self._note(node.targets[0], node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._note(node.target, node.value)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._note(node.target, node.value)
        self.generic_visit(node)

    def _note(self, target: ast.AST, value: ast.AST | None) -> None:
        """Names of fields that a variable holds."""
        if isinstance(value, ast.Tuple):
            names = [one.value for one in value.elts if isinstance(one, ast.Constant)]
            self.tuples.setdefault(ast.unparse(target), []).extend(map(str, names))
        elif isinstance(value, ast.Constant) and isinstance(value.value, str):
            self.known[ast.unparse(target)] = value.value

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func)
        if name in RULES:
            getattr(self, f"_check_{name.lstrip('_')}")(node.args)
        self.generic_visit(node)

    def _names(self, args: list[ast.expr]) -> Iterator[str]:
        for arg in args:
            if isinstance(arg, ast.Starred):
                name = ast.unparse(arg.value)
                yield from self.tuples.get(name) or self.known.get(name, ())
            elif isinstance(arg, ast.Constant):
                yield str(arg.value)

    def _check_at_least(self, args: list[ast.expr]) -> None:
        least = ast.unparse(args[2])
        if "inf" not in least:
            self.bounds.update(dict.fromkeys(self._names(args[3:]), f"at least {least}"))

    def _check_whole_or_none(self, args: list[ast.expr]) -> None:
        bound = f"at least {ast.unparse(args[2])}"
        self.bounds.update(dict.fromkeys(self._names(args[3:]), bound))

    def _check_positive(self, args: list[ast.expr]) -> None:
        self.bounds.update(dict.fromkeys(self._names(args[2:]), "above 0"))

    def _check_require_at_least(self, args: list[ast.expr]) -> None:
        section, _, name = (self._text(args[0]) or "").rpartition(".")
        if section == self.known["s"]:
            self.bounds[name] = f"at least {ast.unparse(args[2])}"

    def _check_require(self, args: list[ast.expr]) -> None:
        name, remedy = (self._text(args[1]), self._text(args[3])) if len(args) == 4 else ("", "")
        if name and remedy and "…" not in name:
            self.rules.setdefault(name, []).append(re.sub(r" ?= …", "", remedy))

    def _text(self, node: ast.expr) -> str | None:
        """A text of the code, with … for what is not known here; None if it is none."""
        if isinstance(node, ast.Constant):
            return str(node.value)
        if not isinstance(node, ast.JoinedStr):
            return None
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else self._filled_in(part)
            for part in node.values
        )

    def _filled_in(self, part: Any) -> str:
        names = {node.id for node in ast.walk(part.value) if isinstance(node, ast.Name)}
        if names <= self.known.keys():
            return str(eval(ast.unparse(part.value), self.known))
        return "…"


def in_words(hint: Any) -> str:
    """A type as what a YAML file has for it."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        words = list(dict.fromkeys(in_words(arg) for arg in args))
        if all(word.startswith("`") for word in words):  # of values alone
            words = ", ".join(words).rsplit(", ", 1)
        return " or ".join(words)
    if origin is Literal:
        return ", ".join(f"`{arg}`" for arg in args)
    if origin is tuple:
        each = [in_words(arg) for arg in args if arg is not Ellipsis]
        one = each[0].removeprefix("a ")
        return f"a list of {one}s" if Ellipsis in args else f"[{', '.join(each)}]"
    if origin is Callable:
        return "`file.py:name`"
    if origin is not None and issubclass(origin, Mapping):
        return "a mapping" if _dataclass_of(hint) is None else "names, each with a section"
    names = {int: "whole number", float: "number", bool: "`true`, `false`", str: "text"}
    return "`null`" if hint is type(None) else names.get(hint, "a section")


def default_of(field: dataclasses.Field[Any]) -> str:
    """A default as YAML; of a section none."""
    if field.default is dataclasses.MISSING:
        return "required" if field.default_factory is dataclasses.MISSING else "{}"
    return f"`{_as_yaml(field.default)}`"


def _as_yaml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_as_yaml, value))}]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _row(cells: tuple[str, ...]) -> str:
    plain = (" ".join(cell.split()).replace("|", chr(92) + "|") for cell in cells)
    return f"| {' | '.join(plain)} |\n"


def _anchor(section: str) -> str:
    return section.replace(".", "")


def section_of(cls: type, name: str) -> str:
    """One section: what it is, a row for each setting, and the rules that bind several."""
    hints, told, rules = typing.get_type_hints(cls), docstrings(cls), Rules.of(cls, name)
    lines = [f"## {name}\n\n", _summary(cls), "\n\n"]
    lines.append(HEAD)
    if name in FURTHER:
        lines.append(_row(tuple(f"`{c}`" if i == 0 else c for i, c in enumerate(FURTHER[name]))))
    for field in dataclasses.fields(cls):
        if f"{name}.{field.name}" in ELSEWHERE:
            continue
        inner, kind = _dataclass_of(hints[field.name]), in_words(hints[field.name])
        if inner is not None:
            key = f"{name}.{field.name}"
            kind = kind.replace("section", f"[section](#{_anchor(key)})")
        bound = rules.bounds.get(field.name)
        kind = kind.replace("number", f"number {bound}", 1) if bound else kind
        is_section = inner is not None and "null" not in kind and "names" not in kind
        default = "" if is_section else default_of(field)
        lines.append(_row((f"`{field.name}`", kind, default, _marked(told.get(field.name, "")))))
    return "".join(lines) + _rules(rules.rules, f"{name}.") + "\n"


def _summary(cls: type) -> str:
    return _marked(inspect.cleandoc(cls.__doc__ or "").split("\n\nExample")[0])


def _marked(text: str) -> str:
    return LINK.sub(r"[\1](\1.md)", CODE.sub(r"`\1`", text))


def _rules(rules: Mapping[str, list[str]], prefix: str) -> str:
    rows = [
        f"- `{name.removeprefix(prefix)}`: {remedy}\n"
        for name, remedies in rules.items()
        for remedy in dict.fromkeys(remedies)
        if name not in ELSEWHERE
    ]
    return "\nRefused unless:\n\n" + "".join(rows) if rows else ""


def _top() -> str:
    told = docstrings(settings.RunSettings)
    sections = (*settings._SECTIONS, "evaluation")
    rows = []
    for name in (key for key in settings._KEYS if key not in sections):
        kind, default, words = TOP.get(name, ("text", "`null`", told.get(name, "")))
        rows.append(_row((f"`{name}`", kind, default, _marked(words))))
    links = ", ".join(f"[{name}](#{name})" for name in sections)
    end = (
        f"\nA run has a `reward`, an `environment`, or both. All else is in sections: {links}.\n\n"
    )
    return f"## The file\n\n{HEAD}{''.join(rows)}{end}"


def _engine_arguments() -> str:
    head = "## Arguments of vLLM's engine\n\nWhat `rollout.engine.kwargs` takes "
    told = "([servers](servers.md#arguments-of-the-engine) says why not the others):\n\n"
    values = {name: remedy.removeprefix("must be ") for name, (_, remedy) in TUNES.items()}
    rows = "".join(_row((f"`{name}`", value)) for name, value in values.items())
    return f"{head}{told}| argument | value |\n| --- | --- |\n{rows}\n"


def _across() -> str:
    rules: dict[str, list[str]] = {}
    for thing in (sections.Sections, sections.check_placement, sections.check_together):
        for name, remedies in Rules.of(thing, "").rules.items():
            rules.setdefault(name, []).extend(remedies)
    return "## Across sections\n" + _rules(rules, "") + "\n"


def _in_python() -> str:
    rows = []
    classes = {**settings._SECTIONS, "evaluation": EvaluationConfig}
    for name in ("mode", "prompts", *classes):
        cls, argument = ARGUMENTS.get(name) or (f"`{classes[name].__name__}`", f"`{name}_config`")
        rows.append(_row((f"`{name}`", cls, argument)))
    return IN_PYTHON + "".join(rows)


def page() -> str:
    """``docs/settings.md``."""
    told = "".join(section_of(cls, name) for cls, name in sections_of_yaml())
    return PAGE + _top() + told + _engine_arguments() + _across() + _in_python()


if __name__ == "__main__":
    sys.stdout.write(page())
