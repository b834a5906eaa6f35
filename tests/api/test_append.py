"""append_kv: what it writes and leaves alone, its ways (eager, torch.compile, inference mode), and bad input."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.tools.append_cases import CASES, FLOAT64, AppendCase, Built, check
from tileattn import append_kv

BY_ID = {case.id: case for case in CASES}
PAGED, PACKED, CONTIGUOUS = BY_ID["halves-pages"], BY_ID["packed"], BY_ID["interleaved"]
POSITIONS = BY_ID["positions"]


@pytest.mark.parametrize("case", [*CASES, FLOAT64], ids=lambda case: case.id)
def test_case(case: AppendCase) -> None:
    built = Built(case)
    places, options = built.arguments
    check(built, append_kv(*places, **options))


def test_rotation_is_rounded_once() -> None:
    """Computed in float32, whatever the dtypes of rows and tables."""
    built = Built(replace(BY_ID["tables-bf16"], seqlens=(40, 40)))
    places, options = built.arguments
    rotated = append_kv(*places, **options)
    assert rotated is not None
    assert built.q is not None
    assert built.cos is not None
    assert built.sin is not None
    cos, sin = built.cos[39].float(), built.sin[39].float()
    first, second = built.q[..., :24].float(), built.q[..., 24:48].float()
    assert torch.equal(rotated[..., :24], (first * cos - second * sin).bfloat16())
    assert torch.equal(rotated[..., 24:48], (first * sin + second * cos).bfloat16())


def test_steps_give_what_one_call_gives() -> None:
    """Each token is rotated by its own position, whichever call brings it."""
    whole = Built(replace(PAGED, seqlens=(5, 9, 7), new=5))
    places, options = whole.arguments
    rotated = append_kv(*places, **options)
    assert rotated is not None
    steps = Built(whole.case)
    of_steps = []
    for i in range(5):
        now = slice(i, i + 1)
        arguments = steps.k[:, now], steps.v[:, now], steps.k_cache, steps.v_cache, steps.seqlens_k - 4 + i
        of_steps.append(append_kv(*arguments, **options | {"q": steps.q[:, now]}))
    assert torch.equal(torch.cat(of_steps, 1), rotated)
    assert torch.equal(bits(steps.k_cache), bits(whole.k_cache))
    assert torch.equal(bits(steps.v_cache), bits(whole.v_cache))


def bits(x: Tensor) -> Tensor:
    """NaN equals NaN of the same bits."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def test_rows_of_a_contiguous_cache_in_another_order() -> None:
    """A table of one column: the pages are the sequences' rows."""
    built = Built(BY_ID["plain"])
    rows = torch.tensor([2, 0, 1], dtype=torch.int32)
    append_kv(built.k, built.v, built.k_cache, built.v_cache, built.seqlens_k, page_table=rows[:, None])
    for b, (row, seqlen) in enumerate(zip(rows.tolist(), built.case.seqlens)):
        assert torch.equal(built.k_cache[row, seqlen - 1], built.k[b, 0])


def test_no_sequence_and_no_token() -> None:
    for shape in ((0, 3, 2, 8), (2, 0, 2, 8)):
        k, cache = torch.ones(shape), torch.zeros(shape[0], 5, 2, 8)
        lengths = torch.zeros(shape[0], dtype=torch.int32)
        cos = torch.ones(7, 4)
        q = append_kv(k, k, cache, cache.clone(), lengths, q=torch.ones(shape[0], 1, 4, 8), cos=cos, sin=cos)
        assert q is not None
        assert q.shape == (shape[0], 1, 4, 8)
        assert not cache.any()


def test_a_cache_without_pages() -> None:
    """Padding entries need none."""
    k, cache = torch.ones(2, 1, 2, 8), torch.zeros(0, 16, 2, 8)
    lengths, table = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 0, dtype=torch.int32)
    assert append_kv(k, k, cache, cache.clone(), lengths, page_table=table) is None
    with pytest.raises(ValueError, match="seqlens_k must be from 0 to the cache's capacity 0, got 1"):
        append_kv(k, k, cache, cache.clone(), lengths + 1, page_table=table)


# --- Ways of a call ---


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_write_is_seen_by_autograd(backend: str) -> None:
    """Also that of a kernel, which PyTorch does not see."""
    if backend == "triton":
        pytest.importorskip("triton")
    built = Built(CONTIGUOUS)
    places, options = built.arguments
    versions = built.k_cache._version, built.v_cache._version
    append_kv(*places, **options, backend=backend)
    assert built.k_cache._version > versions[0]
    assert built.v_cache._version > versions[1]


def test_inference_mode() -> None:
    with torch.inference_mode():
        built = Built(PAGED)
        places, options = built.arguments
        check(built, append_kv(*places, **options))


def test_tensors_that_require_grad_without_grad_mode() -> None:
    built = Built(CONTIGUOUS)
    built.k.requires_grad_()
    places, options = built.arguments
    with torch.no_grad():
        rotated = append_kv(*places, **options)
        check(built, rotated)
    assert rotated is not None
    assert not rotated.requires_grad


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        pytest.param("halves-pages", "inductor", marks=pytest.mark.slow),  # its compiler takes 9 s
        *((name, "aot_eager") for name in ("halves-pages", "packed-short", "without-q", "plain", "q-positions")),
    ],
)
def test_compiled(name: str, backend: str) -> None:
    """One graph; the caches, also views of one buffer, are mutated in place."""
    built = Built(BY_ID[name])
    places, options = built.arguments

    def step(places: tuple[Tensor, ...], options: dict[str, Any]) -> Tensor | None:
        k, v, *rest = places
        return append_kv(k * 1, v * 1, *rest, **options)

    addresses = built.k_cache.data_ptr(), built.v_cache.data_ptr()
    check(built, torch.compile(step, fullgraph=True, backend=backend)(places, options))
    assert (built.k_cache.data_ptr(), built.v_cache.data_ptr()) == addresses


@pytest.mark.usefixtures("fresh_dynamo")
def test_new_sizes_are_not_compiled_again() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def step(places: tuple[Tensor, ...], options: dict[str, Any]) -> Tensor | None:
        return append_kv(*places, **options)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for seqlens, new in (((5, 64, 33), 4), ((9, 9, 7, 30), 3), ((5, 64, 33, 70, 90, 4), 2)):
        built = Built(replace(PAGED, seqlens=seqlens, new=new))
        check(built, compiled(*built.arguments))
    assert counter.frame_count == 1


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_read_after_the_write_in_one_graph() -> None:
    built = Built(CONTIGUOUS)
    places, options = built.arguments

    def step() -> tuple[Tensor | None, Tensor]:
        rotated = append_kv(*places, **options)
        return rotated, built.k_cache[:, 1] * 2

    rotated, read = torch.compile(step, fullgraph=True, backend="aot_eager")()
    check(built, rotated)
    assert torch.equal(bits(read), bits(built.k_cache[:, 1] * 2))
    assert not read[1].isnan().any()


def test_the_operator_says_what_it_does() -> None:
    """Schema, fake kernel and mutation, as torch.library checks them."""
    for name in ("halves-pages", "without-q"):
        built = Built(BY_ID[name])
        (k, v, *rest), options = built.arguments
        names = "page_table cu_seqlens_q cos sin interleaved positions q q_positions"
        given = [options.get(each) for each in names.split()]
        torch.library.opcheck(torch.ops.tileattn.append_kv.default, (k, v, *rest, *given, None))


def test_fake_tensors() -> None:
    with FakeTensorMode():
        k, cache = torch.empty(2, 1, 4, 8), torch.empty(2, 9, 4, 8)
        cos, lengths = torch.empty(9, 4), torch.ones(2, dtype=torch.int32)
        q = append_kv(k, k, cache, cache.clone(), lengths, q=torch.empty(2, 1, 8, 8), cos=cos, sin=cos)
        assert q is not None
        assert q.shape == (2, 1, 8, 8)
        with pytest.raises(ValueError, match=re.escape("seqlens_k must have shape (batch,) = (2,), got (3,)")):
            append_kv(k, k, cache, cache.clone(), torch.ones(3, dtype=torch.int32))


# --- Bad input ---


def halved(x: Tensor) -> Tensor:
    return x[..., ::2]


# The case, what is changed in its arguments, and what is said.
BAD: dict[str, tuple[AppendCase, dict[str, Callable[[Any], Any]], type[Exception], str]] = {
    "k no tensor": (CONTIGUOUS, {"k": lambda k: None}, TypeError, "k must be a torch.Tensor, got NoneType"),
    "v no tensor": (CONTIGUOUS, {"v": lambda v: [1.0]}, TypeError, "v must be a torch.Tensor, got list"),
    "k 3 dims": (CONTIGUOUS, {"k": lambda k: k[0]}, ValueError, r"k must have 4 dimensions, \(batch, new,"),
    "packed 4 dims": (PACKED, {"k": lambda k: k[None]}, ValueError, r"k must have 3 dimensions, \(total,"),
    "cache 3 dims": (PAGED, {"k_cache": lambda c: c[0]}, ValueError, r"k_cache must have 4 dimensions, \(batch, cap"),
    "no element": (CONTIGUOUS, {"k": lambda k: k[..., :0]}, ValueError, "k must have at least 1 head and 1 element"),
    "strided k": (CONTIGUOUS, {"k": halved}, ValueError, "k must have a contiguous last dimension"),
    "strided cache": (CONTIGUOUS, {"v_cache": halved}, ValueError, "v_cache must have a contiguous last dimension"),
    "expanded": (
        CONTIGUOUS, {"k_cache": lambda c: c[:1].expand_as(c)}, ValueError, "k_cache must not be expanded, got strides"
    ),
    "fp8": (CONTIGUOUS, {"k_cache": lambda c: c.to(torch.float8_e4m3fn)}, NotImplementedError, "not supported yet"),
    "int": (CONTIGUOUS, {"k": lambda k: k.int()}, TypeError, "k must be float16, bfloat16, float32 or float64, got"),
    "dtypes": (CONTIGUOUS, {"v_cache": Tensor.float}, TypeError, "v_cache must have k's dtype torch.float16, got"),
    "q's dtype": (CONTIGUOUS, {"q": Tensor.float}, TypeError, "q must have k's dtype torch.float16, got torch.float32"),
    "device": (CONTIGUOUS, {"v": lambda v: v.to("meta")}, ValueError, "v must be on k's device cpu, got meta"),
    "cache grad": (
        CONTIGUOUS, {"k_cache": Tensor.requires_grad_}, ValueError, "k_cache must not require grad: it is written"
    ),
    "k grad": (CONTIGUOUS, {"k": Tensor.requires_grad_}, ValueError, "append_kv has no gradients, and k requires grad"),
    "q grad": (CONTIGUOUS, {"q": Tensor.requires_grad_}, ValueError, "append_kv has no gradients, and q requires grad"),
    "long lengths": (CONTIGUOUS, {"seqlens_k": Tensor.long}, TypeError, "seqlens_k must be int32, got torch.int64"),
    "list of lengths": (CONTIGUOUS, {"seqlens_k": Tensor.tolist}, TypeError, "seqlens_k must be an int32 tensor"),
    "lengths 2 dims": (CONTIGUOUS, {"seqlens_k": lambda s: s[None]}, ValueError, "seqlens_k must have shape"),
    "strided lengths": (
        CONTIGUOUS, {"seqlens_k": lambda s: s.repeat_interleave(2)[::2]}, ValueError, "seqlens_k must be contiguous"
    ),
    "batch of lengths": (CONTIGUOUS, {"seqlens_k": lambda s: s[:1]}, ValueError, r"seqlens_k must .* = \(2,\), got"),
    "batch of cache": (
        CONTIGUOUS, {"k_cache": lambda c: c[:1], "v_cache": lambda c: c[:1]}, ValueError, "needs page_table="
    ),
    "k and v": (CONTIGUOUS, {"v": lambda v: v[:, :1]}, ValueError, "k and v must agree in all but head_dim"),
    "caches": (PAGED, {"v_cache": lambda c: c[1:]}, ValueError, "k_cache and v_cache must agree in all but head_dim"),
    "heads": (
        CONTIGUOUS, {"k": lambda k: k[:, :, :1], "v": lambda v: v[:, :, :1]}, ValueError, "k must have the heads and"
    ),
    "head_dim_v": (CONTIGUOUS, {"v": lambda v: v[..., :32]}, ValueError, r"v must have .* of v_cache, \(2, 64\), got"),
    "table dtype": (PAGED, {"page_table": Tensor.long}, TypeError, "page_table must be int32, got torch.int64"),
    "table 1 dim": (PAGED, {"page_table": lambda t: t[0]}, ValueError, r"page_table must have shape \(batch, pages"),
    "batch of table": (PAGED, {"page_table": lambda t: t[:2]}, ValueError, r"page_table must have .* = \(3, pages"),
    "cu_seqlens_q": (PACKED, {"cu_seqlens_q": lambda c: c[1:]}, ValueError, r"must have .* = \(5,\), got \(4,\)"),
    "long cu_seqlens_q": (PACKED, {"cu_seqlens_q": Tensor.long}, TypeError, "cu_seqlens_q must be int32, got"),
    "q's batch": (CONTIGUOUS, {"q": lambda q: q[:1]}, ValueError, "q must have k's batch size 2, got 1"),
    "q's rows": (PACKED, {"q": lambda q: q[1:]}, ValueError, "q must have k's rows 69, got 68"),
    "q's head_dim": (CONTIGUOUS, {"q": lambda q: q[..., :32]}, ValueError, "q must have k's head_dim 64, got 32"),
    "cos alone": (CONTIGUOUS, {"sin": lambda s: None}, ValueError, "cos and sin must be given together, got cos alone"),
    "sin alone": (CONTIGUOUS, {"cos": lambda s: None}, ValueError, "cos and sin must be given together, got sin alone"),
    "q without cos": (
        CONTIGUOUS, {"cos": lambda c: None, "sin": lambda s: None}, ValueError, "q is for rotary embeddings"
    ),
    "int cos": (CONTIGUOUS, {"cos": Tensor.int}, TypeError, "cos must be a floating-point tensor, got torch.int32"),
    "cos 3 dims": (CONTIGUOUS, {"cos": lambda c: c[None]}, ValueError, r"cos must have shape \(positions, rotary_dim"),
    "no rows": (CONTIGUOUS, {"cos": lambda c: c[:0]}, ValueError, r"cos must have shape \(positions, rotary_dim / 2\)"),
    "strided cos": (CONTIGUOUS, {"sin": halved}, ValueError, "sin must have a contiguous last dimension"),
    "cos and sin": (CONTIGUOUS, {"sin": lambda s: s[1:]}, ValueError, "cos and sin must have one shape and dtype"),
    "their dtypes": (CONTIGUOUS, {"sin": Tensor.half}, ValueError, "cos and sin must have one shape and dtype"),
    "rotary_dim": (
        CONTIGUOUS, {"cos": lambda c: c.repeat(1, 2), "sin": lambda s: s.repeat(1, 2)}, ValueError,
        "rotary_dim from 2 to head_dim 64",
    ),
    "interleaved": (CONTIGUOUS, {"interleaved": lambda _: "yes"}, TypeError, "interleaved"),
    "positions": (POSITIONS, {"positions": lambda p: p[:, 1:]}, ValueError, r"positions must .* \(batch, new\)"),
    "long positions": (POSITIONS, {"positions": Tensor.long}, TypeError, "positions must be int32, got torch.int64"),
    "positions of q": (POSITIONS, {"q": lambda q: q[:, 1:]}, ValueError, "q_positions must be given with positions"),
    "q_positions": (
        BY_ID["q-positions"], {"q_positions": lambda p: p[:, 1:]}, ValueError, r"q_positions must .* \(batch, q_len\)"
    ),
    "q_positions alone": (BY_ID["q-positions"], {"q": lambda q: None}, ValueError, "q_positions needs q, got None"),
    "backend": (CONTIGUOUS, {"backend": lambda _: "cuda"}, ValueError, "backend must be one of .* or None, got 'cuda'"),
    "mma": (CONTIGUOUS, {"backend": lambda _: "mma"}, NotImplementedError, "mma: it has no append_kv"),
    "tilelang": (CONTIGUOUS, {"backend": lambda _: "tilelang"}, NotImplementedError, "device 'cpu' is not one of"),
    "float64": (FLOAT64, {"backend": lambda _: "triton"}, NotImplementedError, "dtype must be float16, bfloat16 or"),
    "unknown": (CONTIGUOUS, {"block_table": lambda _: None}, TypeError, "unexpected keyword argument 'block_table'"),
}  # fmt: skip
PLACES = ("k", "v", "k_cache", "v_cache", "seqlens_k")


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    case, changes, error, says = BAD[name]
    built = Built(case)
    places, options = built.arguments
    arguments = dict(zip(PLACES, places)) | options
    arguments |= {name: change(arguments.get(name)) for name, change in changes.items()}
    places = tuple(arguments.pop(place) for place in PLACES)
    with pytest.raises(error, match=says):
        append_kv(*places, **arguments)
    assert built.k_cache.isnan().all()
    assert built.v_cache.isnan().all()


WRONG_VALUES: dict[str, tuple[AppendCase, Callable[[Built], Any], str]] = {
    "too long": (CONTIGUOUS, lambda b: b.seqlens_k[1:].fill_(12), "capacity 11, got 12 .sequence 1."),
    "negative": (CONTIGUOUS, lambda b: b.seqlens_k[1:].fill_(-1), "seqlens_k must be from 0 .*, got -1 .sequence 1."),
    "page": (PAGED, lambda b: b.table[2].fill_(-1), r"page_table's entries .*, got -1 .sequence 2."),
    "page beyond": (PAGED, lambda b: b.table[1].fill_(99), r"page_table's entries .*, got 99 .sequence 1."),
    "start": (PACKED, lambda b: b.cu_seqlens_q[:1].fill_(1), "cu_seqlens_q must start at 0, must not decrease"),
    "decrease": (PACKED, lambda b: b.cu_seqlens_q[2:3].fill_(4), r"cu_seqlens_q .*, got 4 .sequence 1."),
    "total": (PACKED, lambda b: b.cu_seqlens_q[4:].fill_(70), r"must not go beyond the 69 rows of k, got 70"),
    "positions": (
        POSITIONS,
        lambda b: b.positions[1:].fill_(21),
        "cos and sin, with 21 rows, .*, got 21 .sequence 1.",
    ),
}


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_wrong_values_on_a_cpu(name: str) -> None:
    """They are found at once, and before anything is written."""
    case, change, says = WRONG_VALUES[name]
    built = Built(case)
    change(built)
    places, options = built.arguments
    with pytest.raises(ValueError, match=says):
        append_kv(*places, **options)
    assert built.k_cache.isnan().all()
    assert built.v_cache.isnan().all()


# --- Overlaps ---


def lengths(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_new_rows_in_the_cache() -> None:
    """Also where a call with the same shapes and strides was right before."""
    cache, v_cache, v = torch.zeros(2, 9, 2, 8), torch.zeros(2, 9, 2, 8), torch.ones(2, 1, 2, 8)
    apart = torch.ones(2, 9, 2, 8)[:, :1]
    append_kv(apart, v, cache, v_cache, lengths(3, 3))
    for which, k in (("k_cache", cache[:, :1]), ("k_cache", cache[:, 8:]), ("v_cache", v_cache[:, :1])):
        with pytest.raises(ValueError, match=f"k must not lie in the memory of {which}, which is written; use k.clone"):
            append_kv(k, v, cache, v_cache, lengths(3, 3))
    around = torch.zeros(400)
    cache = around[8:296].view(2, 9, 2, 8)
    for first in (0, 290):  # k begins before the cache, or behind its first element
        k = around[first : first + 32].view(2, 1, 2, 8)
        with pytest.raises(ValueError, match="k must not lie in the memory of k_cache"):
            append_kv(k, v, cache, v_cache, lengths(3, 3))
    append_kv(around[296:328].view(2, 1, 2, 8), v, cache, v_cache, lengths(3, 3))
    with pytest.raises(ValueError, match="v must not lie in the memory of k_cache"):
        append_kv(v, cache[:, :1], cache, v_cache, lengths(3, 3))


def test_caches_that_share_elements() -> None:
    buffer, k = torch.zeros(400), torch.ones(2, 1, 2, 8)
    view = torch.as_strided

    def append(k_cache: Tensor, v_cache: Tensor) -> None:
        append_kv(k, k, k_cache, v_cache, lengths(1, 1))

    cache = view(buffer, (2, 3, 2, 8), (96, 16, 8, 1))
    apart = [
        view(buffer, (2, 3, 2, 8), (96, 16, 8, 1), 48),  # behind one another in each row
        view(buffer, (2, 3, 2, 8), (96, 16, 8, 1), 192),
        view(buffer, (2, 3, 2, 8), (96, 8, 24, 1), 48),  # in another order
    ]
    for other in apart:
        append(cache, other)
        append(other, cache)
    shared = [
        cache,
        view(buffer, (2, 3, 2, 8), (96, 16, 8, 1), 40),
        view(buffer, (2, 3, 2, 8), (96, 16, 8, 1), 1),
        view(buffer, (2, 3, 2, 8), (90, 16, 8, 1), 48),  # its second row reaches into the cache's
        view(buffer, (2, 3, 2, 8), (60, 16, 8, 1), 95),
    ]
    for other in shared:
        with pytest.raises(ValueError, match="k_cache and v_cache must not share elements"):
            append(cache, other)
        with pytest.raises(ValueError, match="k_cache and v_cache must not share elements"):
            append(other, cache)
