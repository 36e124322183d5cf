"""Functions of one argument, to be written in Python: a task whose reward runs a program.

    python benchmarks/peers/programs.py --prompts programs.parquet

`compare.py --task programs` takes the file, and the model that `spelling.py` makes. A response is
run in `ray_apr`'s sandbox against four asserts, one process each; it gets 1 if all hold, else 0.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ray_apr.core.sample import Prompt, Sample
from ray_apr.rewards import code_tests

NUM_PROMPTS, SEED = 4096, 1000
TIME_LIMIT_S = 5.0
ASKED = "Write a Python function f({name}) that returns {what}. Answer with one code block."

reward = code_tests(
    "tests", time_limit_s=TIME_LIMIT_S, memory_mb=512, allow_unsandboxed_writes=True
)
"""For `ray_apr`."""


def main() -> None:
    """Write the prompts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=Path, required=True, help="Parquet file to write")
    args = parser.parse_args()
    draw = random.Random(SEED)
    rows = [one_row(draw) for _ in range(NUM_PROMPTS)]
    pq.write_table(pa.Table.from_pylist(rows), args.prompts)


def one_row(draw: random.Random) -> dict[str, Any]:
    """A conversation with the question, and asserts of the function's value for four arguments."""
    a, b, n = draw.randint(2, 9), draw.randint(1, 99), draw.randint(2, 5)
    numbers: list[tuple[str, Callable[[int], Any]]] = [
        (f"x times {a} plus {b}", lambda x: x * a + b),
        (f"x plus {b}, times {a}", lambda x: (x + b) * a),
        (f"x to the power of {n}, minus {b}", lambda x: x**n - b),
        (f"the remainder of x divided by {a}", lambda x: x % a),
        (f"True if x is larger than {b}, else False", lambda x: x > b),
        ("the sum of all numbers from 1 to x", lambda x: x * (x + 1) // 2),
    ]
    texts: list[tuple[str, Callable[[str], Any]]] = [
        ("the text s in upper case", str.upper),
        ("the text s reversed", lambda s: s[::-1]),
        (f"the text s repeated {n} times", lambda s: s * n),
        (f"the first {n} letters of the text s", lambda s: s[:n]),
        ("the number of letters of the text s", len),
    ]
    lists: list[tuple[str, Callable[[list[int]], Any]]] = [
        ("the largest number of the list a", max),
        ("the sum of the list a", sum),
        ("the list a sorted from small to large", sorted),
        (f"the sum of the list a times {a}", lambda numbers: sum(numbers) * a),
        ("the list a without its first element", lambda numbers: numbers[1:]),
    ]
    kinds: list[tuple[str, Any, Callable[[], Any]]] = [
        ("x", numbers, lambda: draw.randint(1, 199)),
        ("s", texts, lambda: "".join(draw.choices("abcdefgh", k=draw.randint(5, 9)))),
        ("a", lists, lambda: [draw.randint(1, 99) for _ in range(draw.randint(2, 6))]),
    ]
    name, functions, argument = draw.choice(kinds)
    what, function = draw.choice(functions)
    given = [argument() for _ in range(4)]
    question = ASKED.format(name=name, what=what)
    return {
        "prompt": [{"role": "user", "content": question}],
        "tests": [f"assert f({value!r}) == {function(value)!r}" for value in given],
    }


def at_a_time() -> int:
    """Programs that run at the same time, of either system."""
    return len(os.sched_getaffinity(0))


def trl_reward(
    completions: list[list[dict[str, str]]], tests: list[list[str]], **_: Any
) -> list[float]:
    """For TRL, which waits for all of them: its processes share the cores."""
    threads = at_a_time() // int(os.environ["LOCAL_WORLD_SIZE"])
    with ThreadPoolExecutor(max(1, threads)) as pool:
        return list(pool.map(_score, (c[0]["content"] for c in completions), tests))


def _score(text: str, tests: list[str]) -> float:
    prompt = Prompt(prompt_id="p", token_ids=(0,), row={"tests": tests})
    sample = Sample(
        sample_id="s", group_id="g", prompt=prompt, max_response_tokens=1, response_text=text
    )
    return float(reward(sample).reward)


if __name__ == "__main__":
    main()
