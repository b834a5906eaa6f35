"""Integer operations on bounds.

A sum or product that leaves int32 wraps in kernels that compute it in int32 and does not elsewhere. So its bounds hold
for both: they contain all of int32. What may leave int64 is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from .linear import divided, plus, scaled, share
from .values import INT32, INT64, SAFE, Form, Ints, Place, Span, filled, hull, within

_NOTHING = Form((), 0)


class Integers:
    """Makes bounds of integers, and numbers the atoms of their linear forms."""

    def __init__(self, device: Place) -> None:
        self.device = device
        self.numbers: dict[Hashable, int] = {}
        self.atoms: list[Ints] = []

    def constant(self, value: int) -> Ints:
        if not within((value, value), INT64):
            return self.unknown(("constant", value))
        number = filled(value, self.device)
        return Ints(number, number, (value, value), Form((), value))

    def atom(self, key: Hashable, lo: Tensor, hi: Tensor, span: Span, width: int | None = None) -> Ints:
        """An integer of which no linear form is known. Equal keys mean equal values at every position."""
        number = self.numbers.setdefault(key, len(self.atoms))
        if number == len(self.atoms):
            self.atoms.append(Ints(lo, hi, span, Form(((number, 1),), 0), width))
        return self.atoms[number]

    def width_of(self, x: Ints) -> int:
        """A number that is at least hi - lo in every tile. Known without looking at tensors."""
        if x.is_point:
            return 0
        widths = [x.span[1] - x.span[0]]
        atoms = [(self.atoms[atom], times) for atom, times in x.form.terms]
        of_atoms = [atom.span[1] - atom.span[0] if atom.width is None else atom.width for atom, _ in atoms]
        return min(*widths, sum(abs(times) * width for (_, times), width in zip(atoms, of_atoms)))

    def unknown(self, key: Hashable) -> Ints:
        """An integer that may be anything."""
        lo, hi = (filled(end, self.device) for end in INT64)
        return self.atom(key, lo, hi, INT64)

    def _computed(self, form: Form | None, key: Hashable, lo: Tensor, hi: Tensor, span: Span) -> Ints:
        """The result of an operation whose exact value has these bounds; it is `form` if nothing wraps."""
        if within(span, INT32):
            return Ints(lo, hi, span, form) if form is not None else self.atom(key, lo, hi, span)
        wraps = (lo < INT32[0]) | (hi > INT32[1])
        lo, hi = torch.where(wraps, lo.clamp(max=INT32[0]), lo), torch.where(wraps, hi.clamp(min=INT32[1]), hi)
        return self.atom(key, lo, hi, hull(span, INT32))

    def _where_small(self, small: Tensor, key: Hashable, lo: Tensor, hi: Tensor) -> Ints:
        """The result of an operation that may leave int64, and does not where its operands are small."""
        lo, hi = torch.where(small, lo, INT64[0]), torch.where(small, hi, INT64[1])
        return self._computed(None, key, lo, hi, INT64)

    def span_of(self, form: Form) -> Span:
        lo = hi = form.constant
        for atom, times in form.terms:
            ends = [times * end for end in self.atoms[atom].span]
            lo, hi = lo + min(ends), hi + max(ends)
        return lo, hi

    def bounds_of(self, form: Form) -> tuple[Tensor, Tensor] | None:
        """The bounds of a form's exact value; None if computing them may leave int64."""
        reach = abs(form.constant) + sum(
            abs(times) * max(map(abs, self.atoms[atom].span)) for atom, times in form.terms
        )
        if reach >= SAFE:
            return None
        lo = hi = filled(form.constant, self.device)
        for atom, times in form.terms:
            of_atom = self.atoms[atom]
            ends = (times * of_atom.lo, times * of_atom.hi)[:: 1 if times > 0 else -1]
            lo, hi = lo + ends[0], hi + ends[1]
        return lo, hi

    # --- Operations ---

    def add(self, x: Ints, y: Ints, sign: int = 1) -> Ints:
        """x + sign * y."""
        of_y = y.span if sign > 0 else (-y.span[1], -y.span[0])
        span = (x.span[0] + of_y[0], x.span[1] + of_y[1])
        form = plus(x.form, y.form, sign)
        key = ("sum", form)
        lo, hi = (x.lo + y.lo, x.hi + y.hi) if sign > 0 else (x.lo - y.hi, x.hi - y.lo)
        if not within(span, (-SAFE, SAFE)):
            return self._where_small((_size(x) < SAFE / 2) & (_size(y) < SAFE / 2), key, lo, hi)
        if share(x.form, y.form) and (exact := self.bounds_of(form)) is not None:
            lo, hi = torch.maximum(lo, exact[0]), torch.minimum(hi, exact[1])
            of_form = self.span_of(form)
            span = (max(span[0], of_form[0]), min(span[1], of_form[1]))
        return self._computed(form, key, lo, _same(lo, hi, x, y), span)

    def sub(self, x: Ints, y: Ints) -> Ints:
        return self.add(x, y, -1)

    def mul(self, x: Ints, y: Ints) -> Ints:
        if not x.form.terms:
            x, y = y, x
        spans = [a * b for a in x.span for b in y.span]
        span = (min(spans), max(spans))
        key = ("mul", *sorted((x.form, y.form)))
        form = None if y.form.terms else scaled(x.form, y.form.constant)
        lo, hi = _corners(x, y, torch.mul)
        if not within(span, (-SAFE, SAFE)):
            return self._where_small(_size(x) * _size(y) < SAFE, key, lo, hi)
        if x.form == y.form:  # a square
            lo = torch.where((x.lo <= 0) & (x.hi >= 0), 0, lo)
            span = (max(span[0], 0), span[1])
        return self._computed(form, key, lo, _same(lo, hi, x, y), span)

    def floordiv(self, x: Ints, y: Ints) -> Ints:
        divisor = y.form.constant
        if y.form.terms or divisor == 0:
            return self._quotient(x, y)
        if divisor < 0:
            return self.floordiv(self.sub(self.constant(0), x), self.constant(-divisor))
        if not within(x.span, INT32):
            key = ("floordiv", x.form, divisor)
            return self.atom(key, x.lo // divisor, x.hi // divisor, _floored(x.span, divisor))
        lo, hi, span = x.lo // divisor, x.hi // divisor, _floored(x.span, divisor)
        if span[0] == span[1]:
            return self.constant(span[0])
        # x = divisor * whole + rest, and so x // divisor = whole + rest // divisor.
        whole, rest = (self._of_form(part) for part in divided(x.form, divisor))
        if whole is None or rest is None or whole.form == _NOTHING:
            width = self.width_of(x) // divisor + 1
            return self.atom(("floordiv", x.form, divisor), lo, _same(lo, hi, x), span, width)
        of_rest = self.atom(
            ("floordiv", rest.form, divisor),
            rest.lo // divisor,
            rest.hi // divisor,
            _floored(rest.span, divisor),
            self.width_of(rest) // divisor + 1,
        )
        result = self.add(whole, of_rest)
        lo, hi = torch.maximum(lo, result.lo), torch.minimum(hi, result.hi)
        return result._replace(lo=lo, hi=_same(lo, hi, x))

    def _of_form(self, form: Form) -> Ints | None:
        """The integer with this form, which must not leave int32."""
        bounds, span = self.bounds_of(form), self.span_of(form)
        return None if bounds is None or not within(span, INT32) else Ints(*bounds, span, form)

    def mod(self, x: Ints, y: Ints) -> Ints:
        divisor = y.form.constant
        if y.form.terms or divisor == 0:
            return self._remainder(x, y)
        zero = self.constant(0)
        if divisor < 0:
            return self.sub(zero, self.mod(self.sub(zero, x), self.constant(-divisor)))
        key, span = ("mod", x.form, divisor), (0, divisor - 1)
        first = x.lo // divisor
        one = first == x.hi // divisor
        # Where x has one quotient in a tile, the remainder is x less a constant.
        lo = torch.where(one, x.lo - first * divisor, 0)
        hi = torch.where(one, x.hi - first * divisor, divisor - 1)
        if within(x.span, INT32) and divisor <= INT32[1]:
            quotient = self.floordiv(x, y)
            form = plus(x.form, quotient.form, -divisor)
            if (exact := self.bounds_of(form)) is not None:
                lo, hi = torch.maximum(lo, exact[0]), torch.minimum(hi, exact[1])
                return Ints(lo, _same(lo, hi, x), span, form)
        return self.atom(key, lo, _same(lo, hi, x), span)

    def _quotient(self, x: Ints, y: Ints) -> Ints:
        """x // y for a divisor that is not constant. A division by 0 may give anything."""
        crosses, divisor = _apart_from_zero(y)
        lo, hi = _corners(x, divisor, lambda a, b: torch.div(a, b, rounding_mode="floor"))
        # The magnitude is at most that of x, but for -2^63 / -1.
        most = max(map(abs, x.span)) + 1
        if most >= SAFE:
            return self.unknown(("floordiv", x.form, y.form))
        span = (-most, most) if _is_apart_from_zero(y.span) else INT64
        return self._or_anything(("floordiv", x.form, y.form), lo, hi, crosses, span)

    def _remainder(self, x: Ints, y: Ints) -> Ints:
        """x % y for a divisor that is not constant: it has the sign of y, and a smaller magnitude."""
        crosses, divisor = _apart_from_zero(y)
        positive = divisor.lo > 0
        # What is less than every divisor is its own remainder.
        itself = positive & (x.lo >= 0) & (x.hi < divisor.lo)
        lo = torch.where(positive, torch.where(itself, x.lo, 0), divisor.lo + 1)
        hi = torch.where(positive, torch.where(x.lo >= 0, torch.minimum(x.hi, divisor.hi - 1), divisor.hi - 1), 0)
        if divisor.is_point and all(within(each.span, (-SAFE // 4, SAFE // 4)) for each in (x, y)):
            # As by a constant: where x has one quotient in a tile, the remainder is x less a number.
            first, last = (torch.div(end, divisor.lo, rounding_mode="floor") for end in (x.lo, x.hi))
            one = first == last
            lo, hi = (torch.where(one, end - first * divisor.lo, rest) for end, rest in ((x.lo, lo), (x.hi, hi)))
        most = max(map(abs, y.span))
        span = hull((-most, most), x.span) if _is_apart_from_zero(y.span) else INT64
        return self._or_anything(("mod", x.form, y.form), lo, hi, crosses, span)

    def _or_anything(self, key: Hashable, lo: Tensor, hi: Tensor, unknown: Tensor, span: Span) -> Ints:
        lo, hi = torch.where(unknown, INT64[0], lo), torch.where(unknown, INT64[1], hi)
        return self.atom(key, lo, hi, span)

    def minimum(self, x: Ints, y: Ints) -> Ints:
        return self._extremum("min", x, y, torch.minimum, min)

    def maximum(self, x: Ints, y: Ints) -> Ints:
        return self._extremum("max", x, y, torch.maximum, max)

    def _extremum(self, op: str, x: Ints, y: Ints, of: Callable[..., Tensor], of_spans: Any) -> Ints:
        span = (of_spans(x.span[0], y.span[0]), of_spans(x.span[1], y.span[1]))
        lo, width = of(x.lo, y.lo), max(self.width_of(x), self.width_of(y))
        return self.atom((op, *sorted((x.form, y.form))), lo, _same(lo, of(x.hi, y.hi), x, y), span, width)

    def magnitude(self, x: Ints) -> Ints:
        if x.span[0] >= 0:
            return x
        lo = torch.maximum(x.lo, -x.hi).clamp(min=0)
        hi = torch.maximum(-x.lo, x.hi)
        if not within(x.span, (-SAFE, SAFE)):
            return self._where_small(_size(x) < SAFE, ("abs", x.form), lo, hi)
        span = (0, max(map(abs, x.span)))
        return self._computed(None, ("abs", x.form), lo, _same(lo, hi, x), span)


def _same(lo: Tensor, hi: Tensor, *operands: Ints) -> Tensor:
    """`hi`, or `lo` itself if the result is the same at all positions of a tile."""
    return lo if all(x.is_point for x in operands) else hi


def _size(x: Ints) -> Tensor:
    """A float64 that the magnitude of the integer does not exceed by more than a rounding."""
    return torch.maximum(x.lo.double().abs(), x.hi.double().abs())


def _is_apart_from_zero(span: Span) -> bool:
    return span[0] > 0 or span[1] < 0


def _floored(span: Span, divisor: int) -> Span:
    return span[0] // divisor, span[1] // divisor


def _corners(x: Ints, y: Ints, of: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """The least and largest value of an operation that is monotonic in each operand."""
    if y.is_point:
        values = [of(x.lo, y.lo), of(x.hi, y.lo)]
    else:
        values = [of(a, b) for a in (x.lo, x.hi) for b in (y.lo, y.hi)]
    lo = hi = values[0]
    for value in values[1:]:
        lo, hi = torch.minimum(lo, value), torch.maximum(hi, value)
    return lo, hi


def _apart_from_zero(y: Ints) -> tuple[Tensor, Ints]:
    """Where a divisor may be 0, and the divisor with 1 in its place there."""
    crosses = (y.lo <= 0) & (y.hi >= 0)
    lo = torch.where(crosses, 1, y.lo)
    return crosses, y._replace(lo=lo, hi=lo if y.is_point else torch.where(crosses, 1, y.hi))
