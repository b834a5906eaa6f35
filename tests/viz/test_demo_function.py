"""Functions typed into the page of `tileattn demo`: what is read, and that nothing else is executed."""

from __future__ import annotations

import pytest
import torch

from tileattn.viz.demo.function import LONGEST_TEXT, read_mask, read_score


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("score - 0.5 * abs(q - k)", lambda s, q, k: s - 0.5 * (q - k).abs()),
        ("where((q - k) % 3 == 0, score, -score)", lambda s, q, k: torch.where((q - k) % 3 == 0, s, -s)),
        ("clamp(score ** 2, 0, 1) / 2", lambda s, q, k: (s**2).clamp(0, 1) / 2),
        ("minimum(score, tanh(k // 2))", lambda s, q, k: torch.minimum(s, torch.tanh((k // 2).float()))),
    ],
)
def test_a_score_is_what_python_computes(text: str, expected: object) -> None:
    assert callable(expected)
    score, q, k = torch.randn(5, 7), torch.arange(5)[:, None], torch.arange(7)
    torch.testing.assert_close(read_score(text).fn(score, 0, 0, q, k), expected(score, q, k).float())


def test_a_mask_is_what_python_computes() -> None:
    q, k = torch.arange(5)[:, None], torch.arange(7)
    got = read_mask("(q >= k) & ((q - k < 2) | ~(k > 0))").fn(0, 0, q, k)
    assert torch.equal(got, (q >= k) & ((q - k < 2) | ~(k > 0)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("__import__('os').system('true')", "cannot be called"),
        ("score.real", "cannot be used here"),
        ("().__class__", "cannot be used here"),
        ("score[0]", "cannot be used here"),
        ("'a' * 999999999", "cannot be used here"),
        ("[score for x in q]", "cannot be used here"),
        ("lambda: score", "cannot be used here"),
        ("torch", "cannot be used here; accepted: score, b, h, q, k, numbers"),
        ("load(score, q)", "cannot be called"),
        ("abs(*score)", "abs takes 1 argument"),
        ("where(score, q)", "where takes 3 arguments"),
        ("where(score, q, k)", "where takes a condition first, such as q > k, got `score`"),
        ("score % 0", "`score % 0` divides by zero"),
        ("9 ** 999999999", "an exponent is a whole number from 0 to 8"),
        ("((9 ** 8) ** 8) * score", "is no number from"),
        ("1 / 0 * score", "`1 / 0` divides by zero"),
        ("square(" * 30 + "score" + ")" * 30, "at most 300 operations"),
        ("-" * 200 + "score", "nested at most 40 deep"),
        ("(" * 140 + "score" + ")" * 140 + "x", "is no expression of Python"),
        ("score +", "is no expression of Python"),
        ("score" + " " * LONGEST_TEXT, f"at most {LONGEST_TEXT} characters"),
        ("score if q > k else 0", "write where(condition, x, y)"),
        ("score and 1", "write `&` instead of `and`"),
        ("q < k < 3", "compares more than two values"),
        ("q >= k", "must be a number computed from the score, got a condition"),
        ("q - k", "must use `score`"),
    ],
)
def test_anything_else_is_one_error(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=r"^score function: ") as raised:
        read_score(text)
    assert says in str(raised.value)


@pytest.mark.parametrize(("text", "says"), [("q", "got a number"), ("True", "alone"), ("score > 0", "`score`")])
def test_a_mask_is_a_condition_on_positions(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=r"^mask function: ") as raised:
        read_mask(text)
    assert says in str(raised.value)
