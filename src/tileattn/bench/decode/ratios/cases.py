"""The rows of the suite decode-ratios, the methods of each, and which pairs of them must be how far apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch.nn.attention import SDPBackend

from tileattn.bench.baselines.base import OWN
from tileattn.bench.decode.cases import Case
from tileattn.bench.decode.methods import Launch, Method, Own, Plan, Sdpa
from tileattn.bench.decode.variants import FUNCTION, SINK, SOFTCAP, alibi, shorter, window
from tileattn.call.decoding import FixedSplit

MOST_COST, MOST_FIXED = 1.10, 1.10
PLAN_US = 3.0
MOST_ROWS = 64  # group x q_len: a tile's rows
WINDOW = 4096


@dataclass(frozen=True)
class Comparison:
    """Two methods of a row, or one and a bound of its microseconds.

    Attributes:
        group: what is shown, such as "q_len".
        case: the row.
        method: the name of what is judged.
        reference: the name of what it is compared with; None for a bound of its time.
        most: the largest accepted time, in times of the reference or in microseconds.
    """

    group: str
    case: Case
    method: str
    reference: str | None
    most: float


@dataclass(frozen=True)
class Suite:
    """The rows in order, the methods of each, and the comparisons."""

    methods: dict[Case, tuple[Method, ...]]
    comparisons: tuple[Comparison, ...]

    @property
    def names(self) -> list[str]:
        """The names of all methods."""
        return list(dict.fromkeys(method.name for methods in self.methods.values() for method in methods))


@lru_cache(maxsize=4)
def suite(device_type: str, backend: str | None = None) -> Suite:
    """The suite of a device; that of a CPU has the same methods on a few small rows."""
    on_gpu = device_type == "cuda"
    methods: dict[Case, list[Method]] = {}
    comparisons: list[Comparison] = []

    def compare(group: str, case: Case, method: Method, reference: Method | None, most: float) -> None:
        of_row = methods.setdefault(case, [])
        for each in (reference, method):
            if each is not None and all(other.name != each.name for other in of_row):
                of_row.append(each)
        comparisons.append(Comparison(group, case, method.name, reference.name if reference else None, most))

    plain = Own(OWN, backend=backend)
    for case in _rows(on_gpu):
        group = case.heads // case.kv_heads
        for q_len in (2, 4, 8):
            if group * q_len <= MOST_ROWS:
                compare("q_len", case, Own(f"{OWN}-q{q_len}", backend=backend, q_len=q_len), plain, MOST_COST)
        if group == 4:
            for variant in (SOFTCAP, SINK, _alibi(case.heads), FUNCTION):
                changed = Own(f"{OWN}-{variant.name}", backend=backend, variant=variant)
                compare("score modification", case, changed, plain, MOST_COST)
    for case in _windowed(on_gpu):
        keys = min(WINDOW, case.context // 2)
        seen = Own(f"{OWN}-window", backend=backend, variant=window(keys))
        fewer = Own(f"{OWN}-of-window", backend=backend, variant=shorter(keys + 2 * case.page))
        compare("window", case, seen, fewer, MOST_COST)
    for case in _large(on_gpu):
        fixed = Own(f"{OWN}-fixed", backend=backend, splits=FixedSplit(1024))
        compare("FixedSplit(1024)", case, fixed, plain, MOST_FIXED)
    for case in _first_table(on_gpu):
        q_len = 4 if case == Case(16, 8192, 32, 8, 0) else 1
        ours = plain if q_len == 1 else Own(f"{OWN}-q{q_len}-full", backend=backend, q_len=q_len, causal=False)
        suffix = "" if q_len == 1 else f"-q{q_len}"
        for name, kernel in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("fa2", SDPBackend.FLASH_ATTENTION)):
            if q_len > 1:  # the row of one query is in the table too
                compare(f"against {name}", case, plain, Sdpa(name, kernel), 1.0)
            compare(f"against {name}", case, ours, Sdpa(f"{name}{suffix}", kernel, q_len), 1.0)
    for case in _short(on_gpu):
        compare("batch 1 at 1k", case, plain, None, 10.5 if case.heads == case.kv_heads else 7.5)
    for case in _planned(on_gpu):
        compare("plan alone", case, Plan(backend=backend), None, PLAN_US)
        compare("a launch", case, Launch(), None, PLAN_US)
    return Suite({case: tuple(each) for case, each in methods.items()}, tuple(comparisons))


_alibi = lru_cache(maxsize=8)(alibi)  # one variant, so that a row's expectation is computed once


def _rows(on_gpu: bool) -> Sequence[Case]:
    """Where q_len and score modifications are measured."""
    if not on_gpu:
        return [Case(2, 256, 8, 2, 16), Case(2, 256, 8, 2, 0)]
    shapes = ((1, 8192), (16, 8192), (64, 4096))
    both = [Case(*shape, 32, 8, page) for page in (16, 0) for shape in shapes]
    return [*both, *(Case(16, 8192, *heads, page) for page in (16, 0) for heads in ((64, 8), (32, 32)))]


def _windowed(on_gpu: bool) -> Sequence[Case]:
    batches, context = ((1, 16, 64), 32768) if on_gpu else ((2,), 256)
    return [
        Case(batch, context, 32 if on_gpu else 8, 8 if on_gpu else 2, page) for page in (16, 0) for batch in batches
    ]


def _large(on_gpu: bool) -> Sequence[Case]:
    """From 64 MB of K and V on."""
    if not on_gpu:
        return [Case(2, 256, 8, 2, 16)]
    shapes = ((1, 131072, 8, 1), (1, 32768, 32, 8), (16, 8192, 32, 8), (1, 131072, 32, 8), (128, 8192, 64, 8))
    return [Case(*shape, page) for page in (16, 0) for shape in shapes]


def _first_table(on_gpu: bool) -> Sequence[Case]:
    """Contiguous caches where SDPA's kernels are at their best."""
    if not on_gpu:
        return [Case(2, 256, 8, 2, 0)]
    return [
        Case(1, 8192, 32, 8, 0),
        Case(1, 131072, 32, 8, 0),
        Case(16, 8192, 32, 8, 0),
        Case(64, 4096, 64, 8, 0),
        Case(16, 8192, 32, 32, 0),
        Case(16, 8192, 64, 4, 0),
        Case(16, 8192, 8, 1, 0, 256),
    ]


def _short(on_gpu: bool) -> Sequence[Case]:
    if not on_gpu:
        return [Case(1, 128, 8, 2, 16)]
    return [Case(1, 1024, *heads, page) for page in (16, 64, 256, 0) for heads in ((32, 8), (64, 8), (8, 1), (32, 32))]


def _planned(on_gpu: bool) -> Sequence[Case]:
    if not on_gpu:
        return [Case(2, 256, 8, 2, 16)]
    return [Case(1, 1024, 32, 8, 16), Case(16, 8192, 32, 8, 16), Case(128, 1024, 64, 8, 16)]
