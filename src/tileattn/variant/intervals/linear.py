"""Linear forms of integers: sums of atoms times constants.

They know what intervals of single operations do not: that `q - q + k` is `k`, and that `16 * q + 5` is never a multiple
of 4.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .values import INT32, Form, Ints


def plus(x: Form, y: Form, factor: int = 1) -> Form:
    """x + factor * y."""
    terms = dict(x.terms)
    for atom, times in y.terms:
        terms[atom] = terms.get(atom, 0) + factor * times
    return Form(
        tuple(sorted((atom, times) for atom, times in terms.items() if times)), x.constant + factor * y.constant
    )


def scaled(x: Form, factor: int) -> Form:
    return plus(Form((), 0), x, factor)


def share(x: Form, y: Form) -> bool:
    """Whether both have an atom in common."""
    atoms = {atom for atom, _ in x.terms}
    return any(atom in atoms for atom, _ in y.terms)


def divided(x: Form, n: int) -> tuple[Form, Form]:
    """(quotient, rest) such that x = n * quotient + rest; the rest has the terms that n does not divide. n > 0."""
    whole = tuple((atom, times // n) for atom, times in x.terms if times % n == 0)
    rest = tuple((atom, times) for atom, times in x.terms if times % n)
    return Form(whole, x.constant // n), Form(rest, x.constant % n)


def never_zero(form: Form, atoms: list[Ints]) -> Tensor | bool:
    """Where the form has no zero: for at most two atoms exactly, for more by their factors' common divisor.

    Atoms that are the same at all positions of a tile count as part of the constant.
    """
    points = [(atoms[atom], times) for atom, times in form.terms if atoms[atom].is_point]
    terms = [(atoms[atom], times) for atom, times in form.terms if not atoms[atom].is_point]
    constant: Any = form.constant
    for point, times in points:
        constant = times * point.lo + constant
    common = math.gcd(*(times for _, times in terms))
    if common == 0:
        return constant != 0
    never = constant % common != 0
    if never is True or len(terms) > 2 or all(abs(times) == common for _, times in terms):
        return never  # of the rest intervals tell as much
    (x, a), (y, b) = ((atom, times // common) for atom, times in terms)
    if points and max(abs(a), abs(b)) > INT32[1]:
        return never
    return never | _never_zero(a, b, constant // common, x, y)


def _never_zero(a: int, b: int, c: Any, x: Ints, y: Ints) -> Tensor:
    """Where a * x + b * y + c has no zero in the box of x and y; a and b have no common divisor."""
    # Of all integer solutions, x is one residue modulo b, ...
    step = abs(b)
    residue = -(c % step) * pow(a, -1, step) % step
    # ... and a * x = -c - b * y lies between its values at both ends of y.
    ends = (-c - b * y.lo, -c - b * y.hi)
    low, high = torch.minimum(*ends), torch.maximum(*ends)
    if a < 0:
        a, low, high = -a, -high, -low
    first, last = torch.maximum(-(-low // a), x.lo), torch.minimum(high // a, x.hi)
    return first + (residue - first) % step > last
