"""Rewards for text by rules: what is taken out of an answer, what counts as equal, and which rows are refused."""

import math
import os
from pathlib import Path

import pytest
from sympy import sympify

from sfumato.errors import ConfigError, DataError, MissingDependencyError
from sfumato.rewards.answers import ExactAnswer, Format, MultipleChoice, extract_answer, last_boxed, same_text
from sfumato.rewards.base import Sample
from sfumato.rewards.mathematics import MathAnswer, differ_far_below_one, in_box, write_plain_numbers
from sfumato.rewards.scoring.scorer import Scorer


def sample(text, **metadata):
    return Sample(text=text, prompt="What is it?", metadata=metadata, group_id=0)


def value(reward, text, **metadata):
    scores = Scorer([reward]).score([sample(text, **metadata)])
    assert not scores.failed
    return scores.total[0]


@pytest.mark.parametrize(
    ("how", "text", "expected"),
    [
        ("all", "  42 \n", "42"),
        ("all", " \n", None),
        ("marker", "6 * 7\n#### 42\nand more", "42"),
        ("marker", "#### 1\n#### **42**", "42"),
        ("marker", "42", None),
        ("marker", "##### 42", "42"),
        ("marker", "####", None),
        ("marker", "#### \n42", None),
        ("marker:", "**Answer:**\n\n42\nor so", "42"),
        ("marker:", "ANSWER : 42", "42"),
        ("marker:", "answer\uff1a42", "42"),
        ("marker", "Answer: 42", None),
        ("boxed", r"\boxed{1} or \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        ("boxed", r"\boxed{a \boxed{b} c}", "b"),
        ("boxed", r"\fbox{x} \boxed {\{1, 2\}}", r"\{1, 2\}"),
        ("boxed", r"\boxed{1} \boxed{2", "1"),
        ("boxed", r"\boxed{}", None),
        ("boxed", "} 42", None),
        ("tags", "<answer>1</answer> no: <answer> 42 </answer> so", "42"),
        ("tags", "<answer>42", None),
        ("tags", "42</answer>", None),
        ("last_number", "3 apples and 1,234.50 pears.", "1,234.50"),
        ("last_number", "5-3=2, so 7-9 = -2.", "-2"),
        ("last_number", "from 5-3", "3"),
        ("last_number", "either 1,2", "2"),
        ("last_number", "none", None),
        ("last_number", "about 1.5e3", "1.5e3"),
        ("last_number", "1e-05", "1e-05"),
        ("last_number", "at 3em", "3"),
    ],
)
def test_what_is_taken_out_of_an_answer(how, text, expected):
    assert extract_answer(text, how.removesuffix(":"), "Answer:" if how.endswith(":") else "####") == expected


def test_many_open_boxes_take_no_quadratic_time():
    assert last_boxed(r"\boxed{" * 50_000 + "1}") == "1"  # minutes, were each of them followed to the end


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("Paris.", " paris", True),
        ("“New   York”", "new york", True),
        ("$42$", "42", True),
        (r"\text{New York}", "new york", True),
        (r"$\textbf{42}$", "42.0", True),
        (r"\text{a} and \text{b}", "a} and \\text{b", False),
        ("1,000", "1000.0", True),
        ("$1,000", "1000", True),
        ("\u22122", "-2", True),
        ("0.1", "0.10000001", False),
        ("1,00", "100", False),
        ("50%", "50", False),
        ("10\u00b2", "102", False),
        ("10\u00b9\u00b2", "10^12", True),
        ("101\u2082", "1012", False),
        ("H\u2082O", "H2O", True),
        ("ﬁne", "fine", True),
        ("Paris", "Paris, France", False),
        (".", ".", True),
        ("", "x", False),
        ("1e2", "100", True),
        ("1e9999999999", "1", False),
        (r"\(34\)", "34", True),
        (r"$\boxed{34}$", "34", True),
        (r"\[ 34 \]", r"\boxed{35}", False),
    ],
)
def test_what_counts_as_the_same(first, second, same):
    assert same_text(first, second) is same and same_text(second, first) is same


def test_exact_reads_the_row_as_it_reads_the_answer():
    gsm8k = ExactAnswer(extract="marker")
    row = {"answer": "He has 5 + 5 = <<5+5=10>>10 apples.\n#### 1,010"}
    assert value(gsm8k, "so\n#### 1010", **row) == 1.0
    assert value(gsm8k, "so\n#### 1011", **row) == 0.0
    assert value(gsm8k, "1010", **row) == 0.0
    assert value(ExactAnswer(extract="last_number"), "It is 12 apples", answer=12) == 1.0
    assert value(ExactAnswer(), "yes", answer="Yes") == 1.0
    assert value(ExactAnswer(strict=True), "yes", answer="Yes") == 0.0
    nested = ExactAnswer(extract="boxed", target_key="reward_model.ground_truth")
    assert value(nested, r"\boxed{7}", reward_model={"ground_truth": "7", "style": "rule"}) == 1.0
    assert value(ExactAnswer(target_key="a.b"), "7", **{"a.b": "7"}) == 1.0


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("I think\nAnswer: B", True),
        ("**Answer:** (b)", True),
        ("Answer: B. Berlin", True),
        (r"Answer: \text{B}", True),
        ("Answer: $B$", True),
        ("Answer: A\nAnswer: B", True),
        ("Answer: A", False),
        ("Answer: Berlin", False),
        ("Answer: A beer", False),
        (r"Answer: $\boxed{B}$", True),
        (r"Answer: \(B\)", True),
        (r"Answer: \boxed{\textbf{(B)}\ 5}", True),
        (r"Answer: \boxed{A}", False),
        ("**Answer**: B", True),
        ("**Answer**: **B**", True),
        ("Answer: B (Berlin)", True),
        ("Answer: B \u2013 Berlin", True),
        ("Answer: B-complex vitamins", False),
        ("Answer: A (b)", False),
        ("B", False),
        ("Answer: A or B", False),
        ("answer: B, because", True),
        ("Answer: B, a city", True),
        ("Answer: B, A", False),
        ("Answer: (B), (C)", False),
        ("Answer: B, and C", False),
        ("Answer: B / C / D", False),
        ("Answer: B. I think, A.", True),
    ],
)
def test_multiple_choice(text, right):
    for target in ("B", "b", "(B)", 1):
        assert value(MultipleChoice(), text, answer=target) == right


def test_a_choice_without_marker():
    reward = MultipleChoice(extract="all")
    assert [value(reward, text, answer="C") for text in ("C", "(C)", "c.", "D", "Certainly")] == [1, 1, 1, 0, 0]
    assert value(MultipleChoice(extract="boxed"), r"so \boxed{\text{C}}", answer=2) == 1.0


@pytest.mark.parametrize(
    ("reward", "metadata"),
    [
        (ExactAnswer(), {"target": "x"}),
        (ExactAnswer(), {"answer": ""}),
        (ExactAnswer(), {"answer": None}),
        (ExactAnswer(), {"answer": ["x"]}),
        (ExactAnswer(), {"answer": True}),
        (ExactAnswer(), {"answer": math.nan}),
        (ExactAnswer(target_key="a.b"), {"a": {"c": 1}}),
        (ExactAnswer(target_key="a.b"), {"a": "text"}),
        (MultipleChoice(), {"answer": "Berlin"}),
        (MultipleChoice(), {"answer": 26}),
        (MultipleChoice(), {"answer": -1}),
        (MultipleChoice(), {"answer": 1.0}),
        (MathAnswer(), {"answer": []}),
        (MathAnswer(), {}),
    ],
)
def test_rows_that_cannot_be_scored_are_refused_by_name(reward, metadata):
    with pytest.raises(DataError, match=r"What is it\?") as error:
        reward.check_row("What is it?", metadata)
    assert repr(reward.target_key) in str(error.value) and repr(reward.label) in str(error.value)


@pytest.mark.parametrize(
    ("template", "text", "fits"),
    [
        ("think", "<think>hm</think>42", True),
        ("think", "hm\n</think>\n\n42", True),  # the chat template has opened it
        ("think", "<think></think>42", False),
        ("think", "<think>hm</think> ", False),
        ("think", "<think>hm 42", False),
        ("think", "x<think>hm</think>42", False),
        ("think", "<think>a</think>b</think>42", False),
        ("think", "<think>a</think><think>b</think>42", False),
        ("think_answer", "<think>hm</think>\n<answer>42</answer>\n", True),
        ("think_answer", "<think>hm</think>42", False),
        ("think_answer", "<think>hm</think><answer>42</answer> or so", False),
        ("think_answer", "<think>hm</think><answer> </answer>", False),
        ("think_answer", "<think>hm</think><answer>1</answer><answer>2</answer>", False),
        ("think_answer", "<think><answer>1</answer></think><answer>2</answer>", False),
    ],
)
def test_known_forms(template, text, fits):
    assert value(Format(template=template), text) == fits


def test_a_pattern_must_match_all_of_the_answer():
    reward = Format(pattern=r"\{.*\}")
    assert value(reward, "{\n}") == 1.0 and value(reward, "{} done") == 0.0


@pytest.mark.parametrize(
    "settings", [{}, {"pattern": "("}, {"pattern": "x", "template": "think"}], ids=["neither", "broken", "both"]
)
def test_a_format_without_meaning_is_refused(settings):
    with pytest.raises(ConfigError, match="'format'"):
        Format(**settings)


def test_settings_without_meaning_are_refused():
    with pytest.raises(ConfigError, match="marker"):
        ExactAnswer(marker=" ")
    with pytest.raises(ConfigError, match="last_number"):
        MultipleChoice(extract="last_number")
    with pytest.raises(ConfigError, match="process"):
        MathAnswer(process=False)


def test_an_image_is_refused():
    import numpy as np

    image = Sample(image=np.zeros((2, 2, 3), np.uint8), prompt="p", group_id=0, metadata={"answer": "x"})
    for reward in (ExactAnswer(), Format(template="think")):
        with pytest.raises(DataError, match="scores texts"):
            reward.score([image])


# math-verify, where it is installed: pip install --target FOLDER 'math-verify[antlr4_13_2]', SFUMATO_MATH_VERIFY=FOLDER


def test_math_says_how_to_install_what_is_missing(tmp_path):
    with pytest.raises(MissingDependencyError, match=r"pip install --target .*math-verify\[antlr4_13_2\]"):
        Scorer([MathAnswer(package_path=str(tmp_path))]).prepare()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (r"\frac12", r"\boxed{\frac12}"),
        (r"so \boxed{3}", r"so \boxed{3}"),
        (r"it is $\frac12$.", r"it is $\frac12$."),
        (r"\$18.00", r"\boxed{\$18.00}"),
        ("$18", r"\boxed{$18}"),
        ("\u20ac18.50", r"\boxed{\$18.50}"),
        ("1e-05", r"\boxed{1 \times 10^{-5}}"),
        ("-2.5E+16", r"\boxed{-2.5 \times 10^{16}}"),
        ("2e", r"\boxed{2e}"),
        ("2 1/2", r"\boxed{5/2}"),
        ("36.", r"\boxed{36}"),
        ("36 dollars", r"\boxed{36 \$}"),
        (r"10\,000", r"\boxed{10000}"),
        ("-1 234 567.5", r"\boxed{-1234567.5}"),
        ("12 34", r"\boxed{12 34}"),
    ],
)
def test_one_expression_is_shown_to_math_verify(text, shown):
    assert in_box(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (r"so \boxed{10\,000 \text{ m}}", r"so \boxed{10000 \text{ m}}"),
        (r"\boxed{10{,}000+\pi}", r"\boxed{10000+\pi}"),
        (r"\boxed{10,\!000}", r"\boxed{10000}"),
        (r"\boxed{-1.2\overline{34}}", r"\boxed{-\frac{1222}{990}}"),
        (r"\boxed{x = 2\ 1/2}", r"\boxed{x = 5/2}"),
        (r"\boxed{12\ } and \boxed{12.\,}", r"\boxed{12} and \boxed{12}"),
        (r"\boxed{36.} and \boxed{1e-05}", r"\boxed{36} and \boxed{1 \times 10^{-5}}"),
        ("\\boxed{\u20ac18}", r"\boxed{\$18}"),
        ("it is 10 000. So 3 1/2, x^2 1/2", "it is 10 000. So 7/2, x^2 1/2"),
        (r"(1,\,200) and 12\,34", r"(1,\,200) and 12\,34"),
    ],
)
def test_numbers_of_an_answer_are_shown_to_math_verify_as_it_reads_them(text, shown):
    assert write_plain_numbers(text) == shown


@pytest.mark.parametrize("extract", ["all", "marker", "boxed", "tags"])
@pytest.mark.parametrize("target", [r"\frac{1}{2}", r"$\frac{1}{2}$", "x +\n1"])
def test_a_target_that_is_tried_as_an_answer_is_found_in_it(extract, target):
    answer = MathAnswer(extract=extract).write_answer(target)
    part = extract_answer(answer, extract, "####")
    assert part is not None and in_box(part).split() == in_box(target).split()


@pytest.mark.parametrize(
    ("gold", "answer", "differ"),
    [("6.63e-34", "1.6e-19", True), ("2**-99", "2**-98", True), ("1e-9", "0", True), ("1e-9*I", "2e-9*I", True),
     ("6.63e-34", "6.6301e-34", False), ("1/3", "0.333333", False), ("0", "sin(pi)", False), ("x", "1e-9*x", False),
     ("oo", "oo", False)],
)  # fmt: skip
def test_small_numbers_are_compared_by_their_digits(gold, answer, differ):
    assert differ_far_below_one([sympify(gold)], [sympify(answer)]) == differ


@pytest.fixture(scope="module")
def math_reward():
    folder = os.environ.get("SFUMATO_MATH_VERIFY", "")
    if not (Path(folder) / "math_verify").is_dir() or not folder:
        pytest.skip("math-verify is not installed: set SFUMATO_MATH_VERIFY to the folder of pip install --target")
    reward = MathAnswer(package_path=folder, timeout_s=2.5)
    scorer = Scorer([reward])
    scorer.prepare()
    yield reward
    scorer.close()


@pytest.mark.parametrize(
    ("text", "answer", "equal"),
    [
        (r"so it is $\frac{1}{2}$", "0.5", True),
        (r"\boxed{1/2}", r"\frac12", True),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", True),
        (r"\boxed{\{1,2\}}", r"\{2,1\}", True),
        (r"\boxed{\sqrt{8}}", r"$2\sqrt{2}$", True),
        (r"\boxed{3}", 3, True),
        (r"\boxed{3}", 4, False),
        ("", 4, False),
        ("no mathematics", 4, False),
        (r"\boxed{(2,1)}", "(1,2)", False),
        (r"\boxed{18}", r"\$18.00", True),
        (r"\boxed{18}", "$18", True),
        (r"\boxed{18}", "18 \u20ac", True),
        (r"\boxed{0.00001}", 0.00001, True),
        (r"\boxed{2.5}", "2 1/2", True),
        (r"\boxed{1.5}", "2 1/2", False),
        (r"\boxed{10000}", r"10\,000", True),
        (r"\boxed{0}", r"10\,000", False),
        (r"\boxed{10}", "10.", True),
        (r"so it is \boxed{C.}", "C", True),
        (r"\boxed{10. }", "10", True),
        (r"\boxed{1.5}", "1.5", True),
        (r"\boxed{\varnothing}", r"\emptyset", True),
        (r"\boxed{\emptyset}", r"\varnothing", True),
        (r"\boxed{10\,000}", 10000, True),
        (r"\boxed{10{,}000 + x}", "x + 10000", True),
        (r"\boxed{2 1/2}", 2.5, True),
        (r"\boxed{36.}", 36, True),
        (r"\boxed{36 dollars}", 36, True),
        (r"\boxed{12\ }", 12, True),
        (r"\boxed{0.\overline{3}}", "1/3", True),
        (r"\boxed{1/6}", r"0.1\overline{6}", True),
        (r"\boxed{1.6 \times 10^{-19}}", r"6.63 \times 10^{-34}", False),
        (r"\boxed{6.6301e-34}", r"6.63 \times 10^{-34}", True),
        (r"\boxed{0}", r"10^{-9}", False),
    ],
)
def test_mathematical_equality(math_reward, text, answer, equal):
    math_reward.check_row("p", {"answer": answer})
    assert value(math_reward, text, answer=answer) == equal


def test_math_keeps_failures_apart_and_refuses_rows(math_reward):
    scores = Scorer([math_reward]).score(
        [sample(r"\boxed{9^{9^{9^{9}}}}", answer="5"), sample(r"\boxed{5}", answer="5")]
    )
    assert math.isnan(scores.total[0]) and scores.total[1] == 1.0
    assert "took more than 2 s" in next(iter(scores.failed))
    with pytest.raises(DataError, match="no mathematics"):
        math_reward.check_row("p", {"answer": r"\begin{"})
