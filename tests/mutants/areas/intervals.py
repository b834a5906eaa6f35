"""The interval analysis of masks, what the torch backend visits by it, and sparse patterns."""

from __future__ import annotations

from ..mutant import Mutant, mutants

RULES = ("variant/intervals/test_soundness.py::test_every_tile",)
SOUND = ("variant/intervals/test_soundness.py",)
VISITS = ("kernels/torch/test_visits.py",)
PATTERNS = ("variant/test_patterns.py",)
BLOCKS = ("variant/test_blocks.py",)
PACKAGE = "variant/intervals/"

MUTANTS: list[Mutant] = [
    *mutants(
        PACKAGE + "integers.py",
        RULES,
        {
            "intervals: sums do not wrap": ("wraps = (lo < INT32[0]) | (hi > INT32[1])", "wraps = lo > hi"),
            "intervals: what wraps keeps its form": (
                "        return self.atom(key, lo, hi, hull(span, INT32))",
                "        return Ints(lo, hi, hull(span, INT32), form or Form((), 0))",
            ),
            "intervals: sums fit in int64": (
                "self._where_small((_size(x) < SAFE / 2) & (_size(y) < SAFE / 2), key",
                "self._where_small(x.lo <= x.hi, key",
            ),
            "intervals: a difference of lower ends": ("(x.lo - y.hi, x.hi - y.lo)", "(x.lo - y.lo, x.hi - y.hi)"),
            "intervals: a remainder's quotient by its first": (
                "one = first == x.hi // divisor",
                "one = first == first",
            ),
            "intervals: divisors do not cross 0": (
                "crosses = (y.lo <= 0) & (y.hi >= 0)",
                "crosses = (y.lo == 0) & (y.hi == 0)",
            ),
            "intervals: a division by 0 is known": (
                "lo, hi = torch.where(unknown, INT64[0], lo), torch.where(unknown, INT64[1], hi)",
                "lo, hi = lo + 0, hi + 0",
            ),
            "intervals: remainders reach the divisor of the other end": (
                "torch.where(x.lo >= 0, torch.minimum(x.hi, divisor.hi - 1), divisor.hi - 1), 0)",
                "torch.where(x.lo >= 0, torch.minimum(x.hi, divisor.lo - 1), divisor.lo - 1), 0)",
            ),
            "intervals: magnitudes of both signs begin at an end": (
                "lo = torch.maximum(x.lo, -x.hi).clamp(min=0)",
                "lo = torch.minimum(x.lo.abs(), x.hi.abs())",
            ),
        },
    ),
    *mutants(
        PACKAGE + "linear.py",
        SOUND,
        {
            "intervals: a residue of the other sign": ("residue = -(c % step) * pow", "residue = c * pow"),
            "intervals: the last multiple is left out": ("% step > last", "% step >= last"),
            "intervals: factors of a rest divide": (
                "tuple((atom, times // n) for atom, times in x.terms if times % n == 0)",
                "tuple((atom, times // n) for atom, times in x.terms)",
            ),
        },
    ),
    *mutants(
        PACKAGE + "comparisons.py",
        RULES,
        {
            "intervals: NaN compares": (
                "    return always & numbers, sometimes\n",
                "    return always, sometimes\n",
            ),
            "intervals: ranges that touch are equal": (
                "sometimes = (x.lo <= y.hi) & (y.lo <= x.hi)\n        if exact",
                "sometimes = (x.lo < y.hi) & (y.lo < x.hi)\n        if exact",
            ),
            "intervals: less or equal is less": (
                "else (x_hi <= y_lo, x_lo <= y_hi)",
                "else (x_hi <= y_lo, x_lo < y_hi)",
            ),
        },
    ),
    *mutants(
        PACKAGE + "floats.py",
        RULES,
        {
            "intervals: floats are not rounded": ("ROUNDING = 2.0**-22", "ROUNDING = 0.0"),
            "intervals: infinity less infinity is a number": ("x.nan | y.nan | opposite)", "x.nan | y.nan)"),
            "intervals: 0 times infinity is a number": (
                " | (_near_zero(x) & _infinite(y)) | (_near_zero(y) & _infinite(x)))",
                ")",
            ),
            "intervals: roots of negative numbers": (
                "x.hi.clamp(min=0).sqrt(), x.nan | (x.lo < 0), FUNCTION)",
                "x.hi.clamp(min=0).sqrt(), x.nan, FUNCTION)",
            ),
            "intervals: a GPU's minimum of NaN is NaN": (
                "torch.where(nan, torch.maximum(x.hi, y.hi), of(x.hi, y.hi))",
                "of(x.hi, y.hi)",
            ),
        },
    ),
    *mutants(
        PACKAGE + "bits.py",
        SOUND,
        {
            "intervals: all bits are known": ("& ~either, x.lo | either", "& x.hi, x.lo | x.hi"),
            "intervals: and exceeds a negative operand": (
                "torch.where(each.lo >= 0, torch.minimum(hi, each.hi), hi)",
                "torch.minimum(hi, each.hi)",
            ),
        },
    ),
    *mutants(
        PACKAGE + "tables.py",
        ("variant/intervals/test_tables.py",),
        {
            "tables: one window of two": (
                "starts.append((first, last + 1 - (torch.ones_like(level) << level)))",
                "starts.append((first,))",
            ),
            "tables: windows of half the length": ("shift = 2 ** (level - 1)", "shift = 1"),
            "tables: NaN is forgotten": ("least.masked_fill(none, -math.inf), greatest", "least, greatest"),
            "tables: a box reads beyond its end": (
                "torch.minimum(each + step, last.reshape((*last.shape, *[1] * wide)))",
                "(each + step).clamp(max=len(table) - 1)",
            ),
            "tables: elements in parts, all with the first ranges": (
                "else (first.narrow(axis, start, count), last.narrow(axis, start, count))",
                "else (first.narrow(axis, 0, count), last.narrow(axis, 0, count))",
            ),
        },
    ),
    *mutants(
        PACKAGE + "evaluator.py",
        RULES,
        {
            "intervals: indices wrap around": ("(lo := each.lo.clamp(0, size - 1), ", "(lo := each.lo % size, "),
            "intervals: integers are exact in float32": ("_EXACT = 2**24", "_EXACT = 2**40"),
            "intervals: NaN is an integer": ("unknown = x.nan | (x.lo", "unknown = (x.lo"),
        },
    ),
    *mutants(
        PACKAGE + "integers.py",
        SOUND,
        {
            "intervals: a quotient is as wide as its rest": (
                "width = self.width_of(x) // divisor + 1",
                "width = self.width_of(x) // divisor",
            ),
            "intervals: a sum is as wide as one term": (
                "sum(abs(times) * width for (_, times)",
                "max(abs(times) * width for (_, times)",
            ),
        },
    ),
    *mutants(
        PACKAGE + "tiles.py",
        SOUND,
        {
            "intervals: half of a tile decides": ("return common(kinds, 1)\n", "return common(kinds[:, :2], 1)\n"),
        },
    ),
    *mutants(
        "kernels/torch/visits.py",
        VISITS,
        {
            "visits: one head decides": ("    kinds = common(kinds, 1)\n", "    kinds = kinds[:, 0]\n"),
            "visits: one batch element decides": ("if bool((kinds == kinds[:1]).all()) else", "if True else"),
            "visits: the first rows of a block decide": (
                "return common(kinds.unflatten(1, (-1, rows)), 2)",
                "return kinds.unflatten(1, (-1, rows))[:, :, 0]",
            ),
            "visits: mixed cells are whole": (
                "full += [keys] * (kind == Kind.WHOLE)",
                "full += [keys]",
            ),
            "visits: gaps are whole": ("_merged(sorted(full), 0)", "_merged(sorted(full), 20)"),
        },
    ),
    *mutants(
        "variant/sparse/patterns.py",
        PATTERNS,
        {
            "dilated: hides its first key": ("seen = (k >= q - self.left) & seen", "seen = (k > q - self.left) & seen"),
            "strided: one local key less": ("(q - k <= self.local)", "(q - k < self.local)"),
            "global: queries before the first key": (
                "return (k < self.tokens) | ((q >= 0) & (q < self.tokens))",
                "return (k < self.tokens) | (q < self.tokens)",
            ),
            "images: text sees text": ("torch.where(images < 0, seqlen", "torch.where(images < -1, seqlen"),
            "images: of other documents": ("pair = number * (seqlen + 1) + ", "pair = 0 * number + "),
        },
    ),
    *mutants(
        "variant/sparse/blocks.py",
        BLOCKS,
        {
            "blocks: rows are positions": ("(q - self._first(b)) // self.block_q", "q // self.block_q"),
            "blocks: heads of another group": ("h if self.group is None else h // self.group", "h"),
            "blocks: a range ends with its own row": (
                ".cummin(-1).values.flip(-1), end.cummax(-1).values",
                ".flip(-1), end",
            ),
            "blocks: the last block is the first": (
                "count - bits.flip(dim).argmax(dim), 0)",
                "bits.argmax(dim) + 1, 0)",
            ),
        },
    ),
    *mutants(
        "variant/sparse/known_blocks.py",
        ("variant/test_block_mask.py",),
        {
            "known blocks: a row behind the end": (
                "torch.minimum(q.first[row, 0] + rows[:, None], q.last[row, 0])",
                "q.first[row, 0] + rows[:, None]",
            ),
            "known blocks: one pair decides": (
                "seen.any(1).to(torch.int8) + seen.all(1).to(torch.int8)",
                "2 * seen[:, 0].to(torch.int8)",
            ),
            "known blocks: whole blocks are mixed": (
                "(kind == Kind.WHOLE.value) | (",
                "(kind == Kind.WHOLE.value + 1) | (",
            ),
        },
    ),
    *mutants(
        "variant/sparse/block_lists.py",
        BLOCKS,
        {
            "block lists: numbers behind the count": (" < counts[..., None])", " <= counts[..., None])"),
            "block lists: wrong numbers are the last": (
                "torch.where(counted & inside, numbers, width)",
                "torch.where(counted, numbers.clamp(0, width), width)",
            ),
            "block lists: an error is forgotten": ("torch.maximum(status, found, out=status)", "status.copy_(found)"),
        },
    ),
    *mutants(
        "variant/sparse/neighborhood.py",
        PATTERNS,
        {
            "neighborhood: not moved at the end": (
                "return minimum(maximum(i - window // 2, 0), size - window)",
                "return maximum(i - window // 2, 0)",
            ),
            "neighborhood: an even window's other side": ("i - window // 2, 0)", "i - (window - 1) // 2, 0)"),
            "neighborhood: queries beyond the grid": (" & (of_q[0] < self.size_0)", ""),
        },
    ),
]
