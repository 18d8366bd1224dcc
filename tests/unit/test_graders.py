"""Graders: numbers, boxed answers, choices, pass@k."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.graders.boxed import boxed, grade_boxed, same_answer
from inference.graders.choice import choice
from inference.graders.numbers import number, same_number
from inference.graders.pass_at_k import pass_at_k

HALF = Fraction(1, 2)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-1,234.5", Fraction(-2469, 2)),
        ("$1,000,000$", 1_000_000),
        ("1{,}000", 1000),
        (r"\$42.00", 42),
        ("+7", 7),
        ("\N{MINUS SIGN}3", -3),
        (".5", HALF),
        ("3.", 3),
        ("007", 7),
        ("3/4", Fraction(3, 4)),
        ("-1/2", -HALF),
        ("1 3/4", Fraction(7, 4)),
        (r"\frac{1}{2}", HALF),
        (r"\dfrac12", HALF),
        (r"-\tfrac{3}{4}", Fraction(-3, 4)),
        (r"\frac{-3}{4}", Fraction(-3, 4)),
        (r"1\frac{3}{4}", Fraction(7, 4)),
        (r"\frac{1}{\frac{1}{2}}", 2),
        (r"\left(\frac{1}{2}\right)", HALF),
        ("1e3", 1000),
        ("1.5E-2", Fraction(3, 200)),
        (r"1.5\times10^{3}", 1500),
        ("2 x 10^-1", Fraction(1, 5)),
        ("50%", HALF),
        (r"12.5\%", Fraction(1, 8)),
    ],
)
def test_a_number_is_read_exactly(text: str, value: Fraction):
    assert number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "nan", "NaN", "inf", "-Infinity", "1,23", "12,3456", "1 2", "1.2.3", "one", "1/0", r"\frac{1}{0}"),
        *(
            "1e9999",
            "2**3",
            "9^9",
            r"\frac{1}",
            r"\frac{1}{2",
            "1 apple",
            "--1",
            "0x10",
            "1_000",
            "\N{SUPERSCRIPT TWO}",
        ),
        "9" * 201,
    ],
)
def test_anything_else_is_no_number(text: str):
    assert number(text) is None


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_what_is_not_finite_equals_nothing(text: str):
    assert not same_number(text, text)
    assert not same_number(text, "0", tolerance=1e9)


def test_a_tolerance_is_relative_to_the_expected_number():
    assert same_number("3.14", "3.141592653589793", tolerance=0.001)  # off by 0.0005 of it
    assert not same_number("3.13", "3.141592653589793", tolerance=0.001)  # off by 0.0037 of it
    assert not same_number("0.3333", "1/3")
    assert not same_number("0.001", "0", tolerance=0.5)


@given(st.integers(-(10**9), 10**9), st.integers(1, 10**6))
def test_every_spelling_of_a_fraction_is_the_same_number(above: int, below: int):
    sign, size = ("-" if above < 0 else ""), abs(above)
    for text in (f"{above}/{below}", rf"{sign}\frac{{{size}}}{{{below}}}", rf"\frac{{{above}}}{{{below}}}"):
        assert number(text) == Fraction(above, below)
    assert number(f"{above:,}") == above


@given(st.text(max_size=250) | st.text(alphabet="0123456789.,/%eE+-{}()\\fracx^ *", max_size=250))
def test_no_text_breaks_a_grader(text: str):
    assert same_number(text, text) in (True, False)
    assert grade_boxed(text, text) in (0.0, 1.0)
    assert choice(text) in (None, "A", "B", "C", "D")


@pytest.mark.parametrize(
    ("text", "expected", "reward"),
    [  # modelscope/ms-swift#10147
        (r"\boxed{\frac{1}{2}}", "1/2", 1.0),
        (r"\boxed{\frac{1}{2}}", "1/3", 0.0),
        (r"\boxed{\frac{1}{23}}", r"\frac{12}{3}", 0.0),
        (r"\frac{1}{23}", r"\frac{12}{3}", 0.0),
        (r"\boxed{2} no, \boxed{3}", "3", 1.0),
        (r"\boxed{2} no, \boxed{3}", "2", 0.0),
        (r"\fbox{42}", "42", 1.0),
        (r"\boxed{42", "42", 0.0),
        (r"so \boxed {x + 1}.", "x+1", 1.0),
        (r"\boxed{\text{yes}}", "yes", 1.0),
        (r"\boxed{}", "", 0.0),
    ],
)
def test_the_last_box_with_its_braces_balanced_is_the_answer(text: str, expected: str, reward: float):
    assert grade_boxed(text, expected) == reward


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{a{b}{c{d}}}", "a{b}{c{d}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\{}", r"\{"),
        (r"\boxed{1} then \boxed{2", None),
        (r"\boxed{\boxed{5}}", "5"),
        ("no box", None),
        ("boxed{1}", None),
    ],
)
def test_a_box_that_is_not_closed_is_no_answer(text: str, inside: str | None):
    assert boxed(text) == inside


def test_answers_that_are_no_numbers_are_compared_as_text():
    assert same_answer(r"\left( x, y \right)", "(x,y)")
    assert not same_answer("x", "y")
    assert not same_answer("", "")


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        (" (c) ", None),
        ("(C).", "C"),
        ("The answer is (D).", "D"),
        ("Answer: A. No, the answer is B", "B"),
        ("The ANSWER is: **B**", "B"),
        (r"I choose \boxed{C}", "C"),
        (r"\boxed{\text{(A)}}", "A"),
        (r"The answer is A: \boxed{7}", None),
        ("A and B", None),
        ("The answer is Apple", None),
        ("E", None),
    ],
)
def test_a_choice_is_a_letter_that_is_called_the_answer(text: str, letter: str | None):
    assert choice(text) == letter


def test_pass_at_k_of_one_sample_is_not_guessed():
    """paiml/aprender#2118: 50 of 164 right with one sample each says nothing about pass@10."""
    assert pass_at_k(1, 1, 10) is None
    assert pass_at_k(1, 0, 1) == 0
    assert pass_at_k(10, 0, 10) == 0  # openai/human-eval#68


def test_pass_at_k_is_worked_by_hand():
    """Of 5 samples 2 are right: 1 - C(3,1)/C(5,1) = 0.4; 1 - C(3,2)/C(5,2) = 0.7; 1 - C(3,3)/C(5,3) = 0.9; then 1."""
    assert [pass_at_k(5, 2, k) for k in (1, 2, 3, 4)] == [pytest.approx(x) for x in (0.4, 0.7, 0.9, 1.0)]


@pytest.mark.parametrize("counts", [(5, 6, 1), (5, -1, 1), (5, 2, 0)])
def test_pass_at_k_refuses_impossible_counts(counts: tuple[int, int, int]):
    with pytest.raises(ValueError, match="expected 0 <= right"):
        pass_at_k(*counts)
