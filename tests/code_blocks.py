"""The code of pages: read from Markdown, and checked as far as no cluster is needed.

The first word of a fence says the language. `no-run` after ``python`` says that the block starts a
run or needs what is not here: it is compiled, its names, imports and settings are looked up, and it
is not executed. A file's name there gives the block to the blocks and commands after it.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import itertools
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet
import yaml

import ray_apr
from ray_apr.cli.main import _parser
from ray_apr.cli.settings import load_settings
from ray_apr.config.yaml import read_yaml
from ray_apr.core.sample import Sample
from ray_apr.run.model import context_of
from ray_apr.tools.simulator.commands import read_cluster

ROOT = Path(__file__).parents[1]
FENCED = re.compile(r"^```([^\n`]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:\A|\n\n)((?: {4}[^\n]+\n)+)")
SPAN = re.compile(r"`((?:python -m ray_apr|ray-apr|make) [^`\n]+)`")
PLACEHOLDERS = {"N": "1", "K": "1", "S": "1"}
OTHERS = {"anyscale", "cd", "kubectl", "pip", "pytest", "ray", "sbatch", "source", "tensorboard"}
"""Programs of others, whose arguments are not looked at."""
ARITHMETIC = ROOT / "examples/arithmetic"
WHOLE = {
    "model": str(ARITHMETIC / "base_model"),
    "prompts": str(ARITHMETIC / "prompts.parquet"),
    "reward": f"{ARITHMETIC / 'task.py'}:reward",
}
"""What a part of a settings file is read with."""
UNMADE = ("examples/reasoning_gym/",)
"""Folders whose settings name files that a script there makes first."""


@dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    page: Path
    line: int
    language: str
    words: tuple[str, ...]
    text: str

    @property
    def name(self) -> str | None:
        """The file that it is."""
        return next((word for word in self.words if "." in word), None)

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """Fenced blocks and indented ones, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCED.finditer(text):
        language, *words = match[1].split() or [""]
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, language, tuple(words), match[2]))
    plain = FENCED.sub(lambda match: "\n" * match[0].count("\n"), text)
    for match in INDENTED.finditer(plain):
        line = plain.count("\n", 0, match.start(1)) + 1
        found.append(Block(page, line, "", (), re.sub(r"^ {4}", "", match[1], flags=re.MULTILINE)))
    return sorted(found, key=lambda block: block.line)


def commands(page: Path) -> Iterator[list[str]]:
    """Commands of a page: of its blocks without another language, and of its text."""
    for block in blocks(page):
        if block.language in ("", "bash"):
            lines = block.text.replace("\\\n", " ").splitlines()
            for words in (shlex.split(line, comments=True) for line in lines if "`" not in line):
                if block.language or words[:1] in (["python"], ["make"], ["ray-apr"]):
                    yield words
    plain = FENCED.sub("", page.read_text(encoding="utf-8"))
    for span in SPAN.findall(plain):
        words = shlex.split(span)
        is_name = words[:-1] in (["ray-apr"], ["python", "-m", "ray_apr"])
        if "..." not in words:
            yield [*words, "--help"] if is_name else words


def check_command(words: list[str], folder: Path) -> None:
    """Check that a command is one: its program, its options, and the settings that it names.

    Args:
        words: Of the command; variables before it are left out.
        folder: Where files of the page are.

    Raises:
        AssertionError: If it is none.
        ConfigError: For settings that are refused.
    """
    words = [PLACEHOLDERS.get(word, word) for word in words]
    while words and "=" in words[0]:
        words = words[1:]
    if "--" in words:
        words = words[words.index("--") + 1 :]
    words = list(itertools.takewhile(lambda word: word not in (">", "|"), words))
    if not words:
        return
    program = Path(words[0]).name
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        assert words[1] in targets, words
    elif program == "ray-apr":
        _check_arguments(words[1:], folder)
    elif program == "python" and words[1:3] == ["-m", "ray_apr"]:
        _check_arguments(words[3:], folder)
    elif program == "python" and words[1].endswith(".py"):
        _check_script(words[1:], folder)
    elif program == "pip":
        _check_extras(words)
    else:
        assert program in OTHERS or program == "python", f"{program} of {words} is not known"


def _check_arguments(words: list[str], folder: Path) -> None:
    try:
        args = _parser().parse_args(words)
    except SystemExit as end:
        assert end.code == 0, f"no command: {shlex.join(words)}"
        return
    config = getattr(args, "config", None)
    if config is None or str(config).startswith(UNMADE):
        return
    for file in (folder / config, ROOT / config):
        if file.exists():
            load_settings(file, args.overrides)
            return
    assert len(config.parts) == 1, f"no file: {config}"


def _check_script(words: list[str], folder: Path) -> None:
    file = next((f for f in (folder / words[0], ROOT / words[0]) if f.exists()), None)
    assert file is not None, f"no file: {words[0]}"
    sources = [file, *file.parent.glob("*.py")] if file.is_relative_to(ROOT) else [file]
    source = "".join(one.read_text("utf-8") for one in sources)
    missing = [word for word in words if word.startswith("--") and f'"{word}"' not in source]
    assert not missing, f"{words[0]} has no {missing}"


def _check_extras(words: list[str]) -> None:
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    for names in re.findall(r"(?:ray[-_]apr|\.)\[([\w,-]+)\]", " ".join(words)):
        for name in names.split(","):
            assert re.search(rf"^{name} = \[", project, re.MULTILINE), f"no extra: {name}"


def check_settings(block: Block, folder: Path) -> None:
    """Load a block of YAML as settings; a part of a file is completed first.

    Raises:
        ConfigError: For settings that are refused.
    """
    file = folder / (block.name or "part.yaml")
    file.write_text(block.text, "utf-8")
    given = read_yaml(file)  # which refuses a key that is there twice
    if not block.name:
        file.write_text(yaml.safe_dump({**WHOLE, **given}), "utf-8")
    for name in set(re.findall(r"\b(\w+\.py):\w+", block.text)):
        assert (file.parent / name).exists(), f"{block}: no block is {name}"
    named = str([given.get("prompts"), given.get("evaluation")])
    for name in set(re.findall(r"\b(\w+\.(?:parquet|jsonl))\b", named)):
        _stand_in(file.parent / name)
    loaded = load_settings(file)
    context = context_of(loaded.model) if block.name else None
    budget = loaded.rollout.max_response_tokens
    assert context is None or budget < context, f"{block}: {budget} of {context} tokens"


def _stand_in(prompts: Path) -> None:
    """Put prompts where a block names a file of them that no other block is."""
    table = pyarrow.parquet.read_table(ARITHMETIC / "prompts.parquet")
    if prompts.exists():
        return
    if prompts.suffix == ".parquet":
        pyarrow.parquet.write_table(table, prompts)
    else:
        lines = (json.dumps(row) + "\n" for row in table.to_pylist())
        prompts.write_text("".join(lines), "utf-8")


def check_json(block: Block, folder: Path) -> None:
    """Parse a block; one that is a cluster as the simulator does."""
    json.loads(block.text)
    file = folder / (block.name or "part.json")
    file.write_text(block.text, "utf-8")
    if file.name == "cluster.json":
        read_cluster(file)


def check_names(block: Block, namespace: Mapping[str, Any], bound: set[str]) -> None:
    """Check a block that is not executed: its syntax, imports, names, and settings.

    Args:
        block: Of Python.
        namespace: What blocks before it have made.
        bound: Names that blocks before it have bound; those of this one are added.

    Raises:
        AssertionError: For a name that is nothing.
        ConfigError: For settings that are refused.
    """
    tree = ast.parse(block.text, str(block))
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                assert alias.name in _names_of(node.module or ""), f"{block}: no {alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                _names_of(alias.name)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "sample":
            assert hasattr(Sample, node.attr), f"{block}: a sample has no {node.attr}"
        elif isinstance(node, ast.Call):
            _check_call(block, node)
    bound |= _bound(nodes)
    used = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    missing = used - bound - namespace.keys() - vars(builtins).keys()
    assert not missing, f"{block}: nothing is called {sorted(missing)}"


def _bound(nodes: list[ast.AST]) -> set[str]:
    names = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    names |= {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    names |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    imports = [a for n in nodes if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names]
    return names | {(a.asname or a.name).split(".")[0] for a in imports}


def _names_of(module: str) -> Set[str]:
    """Names in a module's code, without an import of it."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"no module {module}"
    if spec.origin is None or not spec.origin.endswith(".py"):
        return set()
    file = Path(spec.origin)
    nodes = list(ast.walk(ast.parse(file.read_text("utf-8"))))
    texts = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return _bound(nodes) | texts | {path.stem for path in file.parent.iterdir()}


def _check_call(block: Block, call: ast.Call) -> None:
    """Make settings that are written out; of other calls look the names of the arguments up."""
    name = ast.unparse(call.func).removeprefix("ray_apr.")
    home = name.partition(".")[0]
    keywords = {keyword.arg for keyword in call.keywords if keyword.arg}
    if name == "APRTrainer":
        known = _fields_in_code("run/options.py")
        assert keywords <= known, f"{block}: APRTrainer takes no {sorted(keywords - known)}"
    elif home in ray_apr.__all__ and is_dataclass(cls := getattr(ray_apr, home)):
        variables = {n.id for n in ast.walk(call) if isinstance(n, ast.Name)} - set(ray_apr.__all__)
        if not variables and home in _settings():
            eval(ast.unparse(call), {one: getattr(ray_apr, one) for one in _settings()})
        known = {field.name for field in fields(cls)}
        assert keywords <= known, f"{block}: {name} takes no {sorted(keywords - known)}"


def _settings() -> list[str]:
    return [name for name in ray_apr.__all__ if name.endswith("Config")]


def _fields_in_code(module: str) -> set[str]:
    tree = ast.parse((ROOT / "ray_apr" / module).read_text("utf-8"))
    return {ast.unparse(n.target) for n in ast.walk(tree) if isinstance(n, ast.AnnAssign)}
