"""Rewards that compare answers (rewards/matching, math_answers, reasoning)."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import threading
import time

import pytest

import ray_apr.rewards
from ray_apr.core.exceptions import ConfigError, RewardError
from ray_apr.rewards import exact_match, math_equal, reasoning, reasoning_gym_score
from ray_apr.rewards.answers import extracted, optional_package
from ray_apr.rewards.math_answers import last_boxed, searchable
from tests.reward_samples import round_trip, sample_of

BOX = "\\boxed"


def test_importing_the_rewards_loads_nothing_heavy():
    heavy = ("torch", "vllm", "ray", "aiohttp", "sympy", "numpy")
    code = "import sys, ray_apr.rewards as r; [getattr(r, name) for name in r.__all__]; "
    code += f"print([m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_every_public_name_has_a_home():
    for name in ray_apr.rewards.__all__:
        assert getattr(ray_apr.rewards, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = ray_apr.rewards.nothing_like_this


def test_a_missing_package_names_the_extra():
    with pytest.raises(ImportError, match=r"ray_apr\[rewards\]"):
        optional_package("no_such_package_at_all", "math-verify", "rewards")


# -- exact_match ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "response", "answer", "expected"),
    [
        ({}, " 42\n", "42", 1.0),
        ({}, "42", 42, 1.0),
        ({}, "2.5", 2.5, 1.0),
        ({}, "7", 7.0, 1.0),  # as Arrow makes of a 7 beside a 7.5
        ({}, "7.0", 7.0, 1.0),
        ({}, "7", 7.5, 0.0),
        ({}, "8", [7.0, 8.0], 1.0),
        ({}, "42.", "42", 0.0),
        ({}, "", "42", 0.0),
        ({"strip": False}, " 42", "42", 0.0),
        ({}, "paris", "Paris", 0.0),
        ({"ignore_case": True}, "PARIS", "Paris", 1.0),
        ({"ignore_case": True}, "STRASSE", "straße", 1.0),
        ({}, "New  York", "New York", 0.0),
        ({"collapse_whitespace": True}, "New \n York ", "New York", 1.0),
        ({}, "b", ["a", "b"], 1.0),
        ({}, "c", ("a", "b"), 0.0),
        ({"pattern": r"is (\d+)"}, "it is 1, no, it is 42.", "42", 1.0),
        ({"pattern": r"is (\d+)"}, "it is 42, no, it is 1.", "42", 0.0),
        ({"pattern": r"\d+"}, "4 or 42", "42", 1.0),
        ({"pattern": r"is (\d+)"}, "42", "42", 0.0),
        ({"pattern": r"<a>(.*)</a>"}, "<a>4\n2</a>", "4\n2", 1.0),
        ({"pattern": re.compile("ANSWER (.)", re.IGNORECASE)}, "answer b", "b", 1.0),
        ({"extract": lambda text: text.rpartition(",")[2]}, "1,2", "2", 1.0),
        ({"extract": lambda text: None}, "2", "2", 0.0),
    ],
)
def test_exact_match(options, response, answer, expected):
    assert round_trip(exact_match(**options))(sample_of(response, answer=answer)) == expected


@pytest.mark.parametrize("answer", [None, "", "  ", [], ["a", ""], {"a": 1}, float("nan")])
def test_a_row_without_an_answer_is_no_zero(answer):
    with pytest.raises(RewardError, match="answer") as caught:
        exact_match()(sample_of("42", answer=answer))
    assert (caught.value.sample_id, caught.value.kind) == ("g0-0", "invalid")


def test_an_extract_that_gives_no_text_is_no_zero():
    with pytest.raises(TypeError, match="extract returned 42; must be a text"):
        exact_match(extract=int, strip=False)(sample_of("42", answer="42"))


def test_a_missing_column_is_named_with_those_that_are_there():
    with pytest.raises(RewardError, match=r"'answer'.*gold, task"):
        exact_match()(sample_of("42", gold="42", task="t"))


def test_a_sample_without_a_text_is_no_zero():
    with pytest.raises(RewardError, match="response_text"):
        exact_match()(sample_of(None, answer="42"))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"column": 3}, "exact_match.column"),
        ({"column": ""}, "exact_match.column"),
        ({"pattern": "("}, "exact_match.pattern"),
        ({"pattern": 7}, "exact_match.pattern"),
        ({"extract": "x"}, "exact_match.extract"),
        ({"extract": str, "pattern": "x"}, "exact_match.extract"),
        ({"ignore_case": 1}, "exact_match.ignore_case"),
    ],
)
def test_exact_match_checks_its_arguments(options, field):
    with pytest.raises(ConfigError) as caught:
        exact_match(**options)
    assert caught.value.field == field


# -- math_equal -----------------------------------------------------------------------------------


@pytest.fixture
def math_verify():
    """The package, or a skipped test."""
    return pytest.importorskip("math_verify")


@pytest.mark.parametrize("answer", [True, float("nan"), float("inf")])
def test_what_is_no_number_is_no_reference_of_math_equal(math_verify, answer):
    with pytest.raises(RewardError, match="which is no number"):
        round_trip(math_equal())(sample_of("42", answer=answer))


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        (f"so it is ${BOX}{{\\frac{{1}}{{2}}}}$", "0.5", 1.0),
        (f"so it is ${BOX}{{\\frac{{1}}{{2}}}}$", "\\frac{2}{4}", 1.0),
        (f"so it is ${BOX}{{\\frac{{1}}{{3}}}}$", "0.5", 0.0),
        (f"first ${BOX}{{7}}$ and then ${BOX}{{8}}$", "8", 1.0),
        (f"${BOX}{{(x+1)^2}}$", "$x^2+2x+1$", 1.0),
        (f"${BOX}{{\\{{3, 1\\}}}}$", "$\\{1, 3\\}$", 1.0),
        (f"${BOX}{{1,000}}$", "1000", 1.0),
        ("The answer is 42", "42", 1.0),
        ("The answer is 41", 42, 0.0),
        ("The answer is **42**.", 42, 1.0),
        ("**Answer: 42**", 42, 1.0),
        ("It is `42`", 42, 1.0),
        ("It is 6*7*1", 42, 1.0),
        ("He pays \\$42.", 42, 1.0),
        (f"{BOX}{{\\$1\\,042}}", "\\$1042", 1.0),
        ("The answer is \N{MINUS SIGN}42.", -42, 1.0),
        ("The answer is \N{MINUS SIGN}42.", 42, 0.0),
        (f"{BOX}{{90\N{DEGREE SIGN}}}", 90, 1.0),
        (f"${BOX}{{0.00005}}$", 0.00005, 1.0),
        (f"${BOX}{{5 \\times 10^{{-5}}}}$", 5e-5, 1.0),
        (f"${BOX}{{5e - 5}}$", 5e-5, 0.0),
        (f"${BOX}{{0.0025}}$", "2.5e-3", 1.0),
        (f"${BOX}{{10^{{16}}}}$", 1e16, 1.0),
        (f"It is {BOX} {{42}}.", 42, 1.0),
        (f"first {BOX}{{7}} and then \\fbox{{42}}", 42, 1.0),
        ("The answer is 3 1/2.", "7/2", 1.0),
        (f"{BOX}{{-3 1/2}}", "-3.5", 1.0),
        (f"{BOX}{{3 1/2}}", 3.5, 1.0),
        (f"{BOX}{{7/2}}", "3 1/2", 1.0),
        ("The answer is 3 5/2.", "11/2", 0.0),
        (f"{BOX}{{0.\\overline{{3}}}}", "\\frac{1}{3}", 1.0),
        (f"{BOX}{{-2.1\\bar 6}}", "-\\frac{13}{6}", 1.0),
        (f"{BOX}{{\\frac{{1}}{{3}}}}", "0.\\overline{3}", 1.0),
        (f"{BOX}{{.\\overline{{9}}}}", 1, 1.0),
        (f"{BOX}{{25_{{7}}}}", "25_{6}", 0.0),
        (f"{BOX}{{25_6}}", "25_{6}", 1.0),
        (f"of $25_{{10}}$ it makes {BOX}{{34_7}}", "34_7", 1.0),
        (f"{BOX}{{25}}", "25_{6}", 1.0),
        ("$x_1 = 3$", "3", 1.0),
        (f"first {BOX}{{7}}, but it is {BOX}{{8}}", "8", 1.0),
        (f"first {BOX}{{7}}, but it is {BOX}{{8}}", "7", 0.0),
        (f"It is {BOX}{{1}} or {BOX}{{2}}.", "\\{1, 2\\}", 1.0),
        (f"{BOX}{{42.}}", "42", 1.0),
        ("It is $\\frac12.$", "0.5", 1.0),
        (f"{BOX}{{1e3}}", "1000", 1.0),
        (f"{BOX}{{1.5e-3}}", 0.0015, 1.0),
        ("The answer is 1e3.", "1000", 1.0),
        ("The answer is 1e3.", "1", 0.0),
        (f"{BOX}{{2e-1}}", "0.2", 1.0),
        (f"{BOX}{{2e-1}}", "2e-1", 1.0),
        (f"{BOX}{{2e - 1}}", "2e-1", 1.0),
        (f"{BOX}{{2e-1}}", "-1+2e", 1.0),
        (f"{BOX}{{12\N{NARROW NO-BREAK SPACE}500}}", "12500", 1.0),
        (f"{BOX}{{12\N{NO-BREAK SPACE}50}}", "1250", 0.0),
        (f"{BOX}{{2^{{3^4}}}}", "2^{81}", 1.0),
        (f"{BOX}{{1 000}}", 1000, 1.0),
        (f"{BOX}{{1000000.5}}", "1 000 000.5", 1.0),
        (f"{BOX}{{5 100/200}}", "11/2", 1.0),
        (f"{BOX}{{1 2 3}}", "123", 0.0),
        (f"{BOX}{{\N{EN DASH}42}}", -42, 1.0),
        (f"{BOX}{{(\N{EN DASH}1, 2)}}", "(-1, 2)", 1.0),
        ("It is \N{EN DASH}42.", -42, 1.0),
        ("It is 3\N{EN DASH}5", -2, 0.0),
        ("I do not know.", "42", 0.0),
        ("", "42", 0.0),
    ],
)
def test_math_equal(math_verify, response, answer, expected):
    result = round_trip(math_equal())(sample_of(response, answer=answer))
    assert result.reward == expected


HUGE = "9^{9^9}"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        (f"It is ${HUGE}$", "5", 0.0),
        (f"{BOX}{{{HUGE}}}", HUGE, 1.0),
        (f"{BOX}{{{HUGE}}}", "9^{9^8}", 0.0),
        (f"{BOX}{{\\frac{{1}}{{{HUGE}}}}}", "5", 0.0),
        (f"{BOX}{{\\binom{{10^9}}{{5\\cdot10^8}}}}", "5", 0.0),
        (f"{BOX}{{\\sinh(10^{{100}})}}", "5", 0.0),
        (f"{BOX}{{\\{{1, {HUGE}\\}}}}", "\\{1, 2\\}", 0.0),
        (f"{BOX}{{\\begin{{pmatrix}}1 & {HUGE}\\end{{pmatrix}}}}", "5", 0.0),
        (f"{BOX}{{((9!)!)!}}", "5", 0.0),
        (f"{BOX}{{(x+1)^{{100000}}}}", "x^5", 0.0),
        (f"{BOX}{{\\sum_{{i=1}}^{{1000000000}} \\frac{{1}}{{i}}}}", "5", 0.0),
        (f"{BOX}{{{'(' * 60}1{')' * 60}}}", "1", 0.0),
        (f"{BOX}{{{'{' * 60}1{'}' * 60}}}", "1", 0.0),
    ],
)
def test_what_would_take_hours_is_not_worked_out(math_verify, response, answer, expected):
    assert math_equal()(sample_of(response, answer=answer)).reward == expected


def test_math_verify_does_not_advise_to_keep_a_time_limit(math_verify, monkeypatch, caplog):
    """known fault: each process said that time limits are off, which `rollout.reward.timeout_s`
    makes up for, so that a dry run looked as if its reward might hang."""
    for module in (math_verify.parser, math_verify.grader):
        monkeypatch.setattr(module, "TIMEOUT_WARNING_SHOWN", False)
    assert math_equal("answer")(sample_of("$1/2$", answer="0.5")).reward == 1.0
    assert caplog.text == ""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("repeated", ["1 2 3 4 ", "\\( x ", "\\[ x ", "$a$ \\( x "])
def test_a_long_text_without_a_box_is_soon_searched(math_verify, repeated):
    """known fault: each of these took minutes, in which the process did nothing else."""
    text = repeated * (60_000 // len(repeated)) + "so it is 5"
    begin = time.process_time()
    assert math_equal()(sample_of(text, answer="5")).reward == 1.0
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("text", ["\\(x=4\\) and \\(", "\\[x=4\\] and \\[", "It is\n\\[4\\]"])
def test_a_formula_is_found_before_one_that_does_not_end(math_verify, text):
    assert math_equal()(sample_of(text, answer="4")).reward == 1.0


def test_a_line_break_of_latex_begins_no_formula():
    matrix = "$\\begin{pmatrix}1 \\\\[2pt] 2 \\\\(3)\\end{pmatrix}$"
    assert searchable(matrix) == matrix


@pytest.mark.parametrize(
    "formula",
    [
        "2024^{2024}", "2024!", "2^{2^{2^2}}", "\\sum_{i=1}^{100} i",
        "\\binom{1000000}{2}", "\\binom{2024}{1012}",
    ],
)  # fmt: skip
def test_numbers_of_some_thousand_digits_are_worked_out(math_verify, formula):
    reward = math_equal()
    assert reward(sample_of(f"{BOX}{{{formula} + 1}}", answer=f"1 + {formula}")).reward == 1.0


def test_math_equal_works_in_a_thread(math_verify):
    results = []
    sample = sample_of(f"${BOX}{{2\\sqrt{{2}}}}$", answer="\\sqrt{8}")
    thread = threading.Thread(target=lambda: results.append(math_equal()(sample)))
    thread.start()
    thread.join()
    assert results[0].reward == 1.0


def test_boxed_only_takes_nothing_else(math_verify):
    reward = math_equal(boxed_only=True)
    unboxed = reward(sample_of("The answer is $42$", answer="42"))
    assert (unboxed.reward, unboxed.metrics) == (0.0, {"math_answer_found": 0.0})
    boxed = reward(sample_of(f"${BOX}{{42}}$, which is not 7", answer="42"))
    assert (boxed.reward, boxed.metrics) == (1.0, {"math_answer_found": 1.0})


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (f"{BOX}{{1}} then {BOX}{{\\frac{{1}}{{2}}}} end}}", "\\frac{1}{2}"),
        (f"{BOX}{{1}} then {BOX}{{2", None),
        ("1", None),
    ],
)
def test_the_last_box_counts_with_its_braces(text, content):
    assert last_boxed(text) == content


def test_float_digits_decide(math_verify):
    sample = sample_of(f"${BOX}{{0.333}}$", answer="0.33349")
    assert math_equal(float_digits=3)(sample).reward == 1.0
    assert math_equal(float_digits=4)(sample).reward == 0.0


def test_a_reference_that_is_no_mathematics_is_no_zero(math_verify):
    with pytest.raises(RewardError, match="no mathematics"):
        math_equal()(sample_of("42", answer="$ $"))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"column": ""}, "math_equal.column"),
        ({"boxed_only": "yes"}, "math_equal.boxed_only"),
        ({"float_digits": -1}, "math_equal.float_digits"),
        ({"float_digits": 1.5}, "math_equal.float_digits"),
    ],
)
def test_math_equal_checks_its_arguments(options, field):
    with pytest.raises(ConfigError) as caught:
        math_equal(**options)
    assert caught.value.field == field


# -- reasoning_gym_score --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gym_row():
    """A row of Reasoning Gym's task of sums, or a skipped test."""
    gym = pytest.importorskip("reasoning_gym")
    entry = gym.create_dataset("chain_sum", size=1, seed=0)[0]
    return {"task": "chain_sum", "entry": json.dumps(entry)}


def test_reasoning_gym_scores_right_wrong_and_missing_answers(gym_row):
    reward, right = round_trip(reasoning_gym_score()), json.loads(gym_row["entry"])["answer"]
    result = reward(sample_of(f"I think\n<answer> {right} </answer>", **gym_row))
    assert (result.reward, result.metrics) == (1.0, {"gym_answer_found": 1.0})
    assert reward(sample_of("<answer>no number</answer>", **gym_row)).reward < 1.0
    missing = reward(sample_of(right, **gym_row))
    assert (missing.reward, missing.metrics) == (0.0, {"gym_answer_found": 0.0})


def test_reasoning_gym_takes_an_entry_that_is_a_mapping(gym_row):
    entry = json.loads(gym_row["entry"])
    reward = reasoning_gym_score(extract=str.strip)
    sample = sample_of(f" {entry['answer']} ", task="chain_sum", entry=entry)
    assert reward(sample).reward == 1.0


@pytest.mark.parametrize(
    ("task", "answer", "reads"),
    [
        ("countdown", "(3 + 4) * 5 - 2 / 7", True),
        ("simple_integration", "-x**3/3 + 2*sin(x) + log(Abs(x)) + C", True),
        ("simple_integration", "Rational(1, 2)*x**2 + acot(x) + sech(x) + C", True),
        ("polynomial_multiplication", "2*x**2 - 0.5*y", True),
        ("spiral_matrix", "1 2 3", True),
        ("spiral_matrix", "[1, 2, -3]", True),
        ("n_queens", "[['_', 'Q'], ['Q', '_']]", True),
        ("string_insertion", "ABCDE", True),
        ("chain_sum", "print(1)", True),  # its scorer does not evaluate it
        ("countdown", "__import__('os').getpid()", False),
        ("countdown", "sqrt('__import__(1)')", False),
        ("countdown", "1 != open('f')", False),
        ("puzzle24", "lambda: 1", False),
        ("puzzle24", "sin(x, key=1)", False),
        ("puzzle24", "(x for x in y)", False),
        ("polynomial_multiplication", "open(1)!", False),
        ("spiral_matrix", "[exit()]", False),
        ("binary_matrix", "().__class__", False),
        ("string_insertion", "[f'{exit()}']", False),
    ],
)
def test_no_scorer_runs_a_program(task, answer, reads):
    assert reasoning.is_harmless(task, answer) == reads


@pytest.mark.parametrize("task", ["spiral_matrix", "countdown"])
def test_an_answer_does_not_run_in_the_reward_worker(task, tmp_path):
    """known fault: it did, with all that its process may do."""
    gym = pytest.importorskip("reasoning_gym")
    entry = json.dumps(gym.create_dataset(task, size=1, seed=0)[0])
    program = f"[__import__('pathlib').Path('{tmp_path}/made').touch()]"
    result = reasoning_gym_score()(sample_of(f"<answer>{program}</answer>", task=task, entry=entry))
    assert (result.reward, result.metrics) == (0.0, {"gym_answer_found": 0.0})
    assert not list(tmp_path.iterdir())
    right = sample_of(f"<answer>{json.loads(entry)['answer']}</answer>", task=task, entry=entry)
    assert reasoning_gym_score()(right).reward == 1.0


def test_an_entrys_own_answer_is_right_whatever_it_calls():
    """known fault: one in seven of intermediate_integration holds an integral, and earned 0.0."""
    gym = pytest.importorskip("reasoning_gym")
    task, reward = "intermediate_integration", reasoning_gym_score()
    dataset = gym.create_dataset(task, size=40, seed=1)
    entry = next(found for found in dataset if "Integral(" in found["answer"])
    unsolved = "Integral({integrand}, {variable})".format(**entry["metadata"])
    for answer, value in ((entry["answer"], 1.0), (unsolved, 0.0)):
        sample = sample_of(f"<answer>{answer}</answer>", task=task, entry=json.dumps(entry))
        assert reward(sample).reward == value


def test_the_scorers_that_evaluate_an_answer_are_known():
    factory = pytest.importorskip("reasoning_gym.factory")
    evaluates = re.compile(r"(?<![\w.])eval\((?!entry)|parse_expr\(")
    found = {
        name
        for name, (cls, _) in factory.DATASETS.items()
        if evaluates.search(inspect.getsource(cls.score_answer))
    }
    assert found == {*reasoning._LITERALS, *reasoning._FORMULAS}


@pytest.fixture
def whole_numbers(monkeypatch):
    """A task whose scorer reads whole numbers and grids of tuples, instead of the package's."""

    def score(answer, entry):
        if entry["answer"] == "grid":
            return float(entry["metadata"]["output"] == ((1, 2), (3, 4)))
        return float(int(answer) == int(entry["answer"]))

    monkeypatch.setattr(reasoning, "_scorer", lambda task: score)


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("<answer> 4 2\n</answer>", "4 2"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("I shall put it in <answer> tags. <answer>42</answer>", "42"),
        ("<answer>a < b </b></answer>", "a < b </b>"),
        ("<answer> </answer>", ""),
        ("<answer>42", None),
        ("<answer>" + "\n" * 8_000, None),
        ("<answer>" * 8_000, None),
        ("<answer>" + "\n x" * 4_000 + "</answer", None),
    ],
)
def test_an_answer_is_between_the_last_tags(said, answer):
    start = time.monotonic()
    assert extracted(said, re.compile(reasoning.ANSWER_TAGS)) == answer
    assert time.monotonic() - start < 2


def score_entry(said: str, task: str = "t", **entry):
    """The result of a response to an entry."""
    sample = sample_of(f"<answer>{said}</answer>", task=task, entry=json.dumps(entry))
    return reasoning_gym_score()(sample)


def test_an_answer_that_the_scorer_cannot_read_is_wrong(whole_numbers):
    assert score_entry("7", answer="7").reward == 1.0
    result = score_entry("rubbish", answer="7")
    assert (result.reward, result.metrics) == (0.0, {"gym_answer_found": 0.0})


def test_an_entry_that_the_scorer_cannot_read_is_no_zero(whole_numbers):
    with pytest.raises(ValueError, match="seven"):
        score_entry("7", answer="seven")


def test_grids_are_tuples_again_after_json(whole_numbers):
    entry = {"answer": "grid", "metadata": {"output": [[1, 2], [3, 4]]}}
    assert score_entry("x", task="arc_agi", **entry).reward == 1.0
    assert score_entry("x", task="other", **entry).reward == 0.0


def test_an_unknown_task_is_no_zero(gym_row):
    with pytest.raises(RewardError, match="no_such_task"):
        reasoning_gym_score()(
            sample_of("<answer>1</answer>", task="no_such_task", entry=gym_row["entry"])
        )


@pytest.mark.parametrize("entry", ["{", "[1]", '{"question": "?"}', 3])
def test_an_entry_that_is_none_is_no_zero(entry):
    with pytest.raises(RewardError, match="'entry'"):
        reasoning_gym_score()(sample_of("<answer>1</answer>", task="chain_sum", entry=entry))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"task_column": ""}, "reasoning_gym_score.task_column"),
        ({"entry_column": 1}, "reasoning_gym_score.entry_column"),
        ({"pattern": "("}, "reasoning_gym_score.pattern"),
        ({"pattern": "x", "extract": str}, "reasoning_gym_score.extract"),
    ],
)
def test_reasoning_gym_score_checks_its_arguments(options, field):
    with pytest.raises(ConfigError) as caught:
        reasoning_gym_score(**options)
    assert caught.value.field == field
