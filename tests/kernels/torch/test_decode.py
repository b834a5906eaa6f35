"""The decode phase of the torch backend: what it reads and copies, its way on a GPU, and batch-invariant bits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.api.test_decode import BATCH, CALLS, CAPACITY, HEADS, MAX_Q, ROWS, contiguous, ints, paged, random
from tileattn import ALiBi, Bias, FixedSplit, SlidingWindow, SoftCap, decode
from tileattn.call import cache_status
from tileattn.call.decoding import DecodeInputs
from tileattn.call.fp8 import accumulator
from tileattn.kernels.torch.decode import backend, capacity, fused, sequences
from tileattn.kernels.torch.decode.cache import COPIED_TILE, Keys
from tileattn.runtime.decoding import DecodeOptions, make_decode_call, sizes_of, with_variant
from tileattn.runtime.dispatch import select_decode
from tileattn.testing import poisoned_memory
from tileattn.variant.program import restore

TREE = torch.ones(1, MAX_Q, MAX_Q, dtype=torch.bool).tril()
VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"mask": SlidingWindow(3, 0)},
    "softcap": {"score_mod": SoftCap(2.0)},
    "bias": {"score_mod": Bias(random(BATCH, HEADS, MAX_Q, CAPACITY + 1))},
    "alibi": {"score_mod": ALiBi(random(HEADS).abs())},
    "function": {"mask": lambda b, h, q, k: (k % 3 != 1) | (q == k), "score_mod": lambda s, b, h, q, k: s * 0.5 + b},
    "tree": {"tree_mask": TREE},
    "sink": {"sink": random(HEADS)},
}


def prepared_inputs(call: dict[str, Any], options: dict[str, Any]) -> tuple[DecodeInputs, DecodeOptions]:
    """What the public function makes of a call."""
    rest, options = dict(call), dict(options)
    q = rest.pop("q")
    longest = rest.pop("max_seqlen_q", ROWS)
    q = q[None] if "cu_seqlens_q" in rest else q
    inputs = DecodeInputs(q, **rest, sink=options.pop("sink", None))
    options = {"mask": None, "score_mod": None, "causal": True, "tree_mask": None} | options
    if options["tree_mask"] is not None:
        options["tree_mask"] = options["tree_mask"][:, :longest, :longest]
    if isinstance(options["score_mod"], Bias):
        options["score_mod"] = Bias(options["score_mod"].tensor[:, :, :longest])
    variant, inputs = with_variant(inputs, longest, **options)
    return inputs, DecodeOptions(variant, 0.25, longest, None, True, None)


def on_capacity(inputs: DecodeInputs, options: DecodeOptions) -> tuple[Tensor, Tensor]:
    mask, mods = restore(options.variant, inputs.operands, accumulator(inputs.q.dtype))
    return capacity.decode(inputs, sizes_of(inputs, options.max_seqlen_q), mask, mods, options.scale)


# --- The way on a GPU, on a CPU ---


@pytest.mark.parametrize("tile", [1, 100, 2**25])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", CALLS)
def test_over_the_capacity_the_result_is_that_of_the_sequences(
    name: str, variant: str, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "MAX_TILE", tile)
    inputs, options = prepared_inputs(CALLS[name](), VARIANTS[variant])
    phase = backend.prepare(make_decode_call(inputs, options), sizes_of(inputs, options.max_seqlen_q), 0.25, None)
    with poisoned_memory():
        got = on_capacity(inputs, options)
    torch.testing.assert_close(got, phase(inputs, phase.plan(inputs)))


@pytest.mark.parametrize("name", CALLS)
def test_over_the_capacity_wrong_values_touch_nothing_outside(name: str) -> None:
    """As on a GPU, where nobody has looked at them: lengths, tables and cu_seqlens."""
    call = CALLS[name]()
    call["seqlens_k"] = ints(-5, 99, 2**31 - 1, 3)
    if "page_table" in call:
        call["page_table"] = torch.full_like(call["page_table"], 2**31 - 1)
        call["page_table"][0] = -(2**31)
    if "cu_seqlens_q" in call:
        call["cu_seqlens_q"] = ints(7, -3, 2**31 - 1, 4, 8)
    o, lse = on_capacity(*prepared_inputs(call, {}))
    assert o.shape[:2] == lse.shape[:1] + lse.shape[2:]
    with pytest.raises(ValueError, match="an earlier call on caches was wrong"):
        cache_status.check_caches()  # else the next call of this process would report it


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", CALLS)
def test_over_the_capacity_nothing_waits_for_the_device(
    name: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fake tensors have no values: whatever asks for one raises."""
    inputs, options = prepared_inputs(CALLS[name](), VARIANTS[variant])
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fakes = {field: mode.from_tensor(x) for field, x in inputs._asdict().items() if isinstance(x, Tensor)}
        operands = inputs.operands
        if operands.tensors:
            tensors = [mode.from_tensor(x) for x in operands.tensors]
            operands = type(operands)(tensors, operands.ints, operands.floats)
        status = mode.from_tensor(cache_status.status_of(inputs.q.device))
        monkeypatch.setattr(cache_status, "status_of", lambda device: status)
        o, lse = on_capacity(inputs._replace(**fakes, operands=operands), options)
    assert o.shape == (*inputs.q.shape[:3], inputs.v_cache.shape[3])
    assert lse.shape == (inputs.q.shape[0], HEADS, inputs.q.shape[1])


def test_over_the_capacity_out_is_written() -> None:
    inputs, options = prepared_inputs(paged(), {})
    expected, _ = on_capacity(inputs, options)
    out = torch.full_like(expected, torch.nan)
    o, _ = on_capacity(inputs._replace(out=out), options)
    assert o is out
    assert torch.equal(out, expected)


def test_a_fixed_split_is_refused_on_a_gpu() -> None:
    inputs, options = prepared_inputs(contiguous(), {})
    call = make_decode_call(inputs, options._replace(splits=FixedSplit(128)))
    assert select_decode(call).name == "torch"
    on_gpu = type(call)(call.dtype, 2000, 2000, arch="sm_90a", fixed=128)
    with pytest.raises(NotImplementedError, match=r"torch: FixedSplit is not batch-invariant .* on a GPU"):
        select_decode(on_gpu)
    assert select_decode(type(call)(call.dtype, 2000, 2000, arch="sm_90a")).name == "torch"


# --- What is read and copied on a CPU ---


class Allocations(TorchDispatchMode):
    """The largest tensor that an operation returns in memory of its own, in bytes."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.known = {x.untyped_storage().data_ptr() for x in known}
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return result


@pytest.mark.slow_except("dtype0-0", "dtype1-16", reason="0.5 s each")
@pytest.mark.parametrize("page", [0, 16, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_cache_is_copied(dtype: torch.dtype, page: int) -> None:
    """Not as a whole: a tile is, where it is converted or gathered."""
    batch, tokens, heads, dim = 2, 16384, 8, 64
    k, v = (random(batch, tokens, heads, dim, seed=seed).to(dtype) for seed in (0, 1))
    inputs = DecodeInputs(random(batch, 1, 32, dim).to(dtype), k, v, ints(tokens, tokens - 1))
    if page:
        table = torch.arange(batch * tokens // page, dtype=torch.int32).view(batch, -1)
        pages = (x.view(-1, page, heads, dim) for x in (k, v))
        inputs = DecodeInputs(inputs.q, *pages, inputs.seqlens_k, table)
    options = DecodeOptions("Causal()", 0.125, 1, None, True, "torch")
    phase = backend.prepare(make_decode_call(inputs, options), sizes_of(inputs, 1), 0.125, None)
    with Allocations(k, v) as seen:
        phase(inputs, None)
    assert seen.largest <= max(COPIED_TILE, sequences.SCORES) * 4
    assert seen.largest <= k[0].nbytes / 8


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", ["q", "k", "k of all", "v"])
def test_fused_attention_says_where_it_may_be_wrong(which: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operator returns lse = 0 for a row whose scores are NaN: then the other way computes the call."""
    monkeypatch.setattr(fused, "PART", 16 * 2 * 8)  # six parts of 16 keys and a rest
    q, k, v = random(1, 2, 4, 8), random(1, 103, 2, 8, seed=1), random(1, 103, 2, 8, seed=2)
    {"q": q, "k": k, "v": v, "k of all": k}[which].view(-1)[:: 1 if which == "k of all" else 901] = value
    inputs = DecodeInputs(q, k, v, ints(103))
    options = DecodeOptions("", 0.3, 2, None, True, "torch")
    call = make_decode_call(inputs, options)
    got = backend.prepare(call, sizes_of(inputs, 2), 0.3, None)(inputs, None)
    monkeypatch.setattr(sequences, "_fused", lambda *arguments: None)
    expected = backend.prepare(call, sizes_of(inputs, 2), 0.3, None)(inputs, None)
    torch.testing.assert_close(got, expected, equal_nan=True)


def test_fused_attention_computes_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    attend = fused.attend
    monkeypatch.setattr(fused, "attend", lambda *arguments: used.append(attend(*arguments)) or used[-1])
    for mask, count, expected in (("Causal()", 1, 1), ("", 3, 1), ("Causal()", 3, 0)):
        used.clear()
        inputs = DecodeInputs(random(1, count, 4, 8), *(random(1, 30, 2, 8, seed=s) for s in (1, 2)), ints(29))
        options = DecodeOptions(mask, 0.3, count, None, True, "torch")
        backend.prepare(make_decode_call(inputs, options), sizes_of(inputs, count), 0.3, None)(inputs, None)
        assert [x is not None for x in used] == [True] * expected


def test_contiguous_keys_are_views() -> None:
    call = contiguous()
    inputs = DecodeInputs(**call)
    k, v = Keys(inputs, 2)(slice(3, 9))
    assert k.data_ptr() == call["k_cache"][2, 3].data_ptr()
    assert v.data_ptr() == call["v_cache"][2, 3].data_ptr()
    assert k.shape[:2] == (1, 6)


@pytest.mark.parametrize("page", [1, 3, 7, 300, 512])
def test_pages_are_gathered_in_the_order_of_the_keys(page: int) -> None:
    tokens, pages = 700, 1500 // page + 2
    keys = torch.arange(tokens, dtype=torch.float32)
    table = torch.full((2, -(-tokens // page) + 2), -7, dtype=torch.int32)
    cache = torch.full((pages, page, 1, 1), torch.nan)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).int()
    for index in range(-(-tokens // page)):
        part = keys[index * page : (index + 1) * page]
        table[1, index] = order[index]
        cache[order[index], : len(part), 0, 0] = part
    read = Keys(DecodeInputs(torch.zeros(2, 1, 1, 1), cache, cache, ints(0, tokens), table), 1)
    for lo, hi in itertools.combinations((0, 1, 6, 7, 8, 299, 300, 301, 512, 699, 700), 2):
        k, v = read(slice(lo, hi))
        assert torch.equal(k.flatten(), keys[lo:hi])
        assert torch.equal(v.flatten(), keys[lo:hi])


@pytest.mark.parametrize("splits", [None, 3, FixedSplit(128)], ids=str)
def test_pages_that_a_window_hides_are_not_read(splits: Any) -> None:
    """Their entries are not followed, and what lies in them does not matter."""
    page, tokens, window = 16, 1025, 40
    table = torch.full((1, 65), -1, dtype=torch.int32)
    k, v = (torch.full((70, page, 2, 16), torch.nan) for _ in range(2))
    first_seen = tokens - 3 - window
    for index in range(first_seen // page, 65):
        table[0, index] = index + 2
        k[index + 2] = random(page, 2, 16, seed=index)
        v[index + 2] = random(page, 2, 16, seed=index + 100)
    k[66, 1:], v[66, 1:] = torch.nan, torch.nan  # past the length
    for rows in (1, 3):
        q = random(1, rows, 4, 16)
        o = decode(q, k, v, ints(tokens), page_table=table, mask=SlidingWindow(window, 0), splits=splits)
        assert not o.isnan().any()
    table[0, first_seen // page] = -1
    with pytest.raises(ValueError, match="page_table must name pages"):
        decode(random(1, 3, 4, 16), k, v, ints(tokens), page_table=table, mask=SlidingWindow(window, 0), splits=splits)


@pytest.mark.parametrize("rows", [1, 31, 32, 70])
def test_prefill_chunks_and_steps_agree(rows: int) -> None:
    """From 32 queries on another loop computes."""
    tokens = 200
    k, v = random(1, tokens, 2, 16, seed=1), random(1, tokens, 2, 16, seed=2)
    q = random(1, 70, 4, 16)
    whole = decode(q.double(), k.double(), v.double(), ints(tokens)).float()
    torch.testing.assert_close(decode(q[:, -rows:], k, v, ints(tokens)), whole[:, -rows:])
    gathered = decode(q[:, -rows:], k[0].view(-1, 10, 2, 16), v[0].view(-1, 10, 2, 16), ints(tokens),
                      page_table=torch.arange(20, dtype=torch.int32)[None])  # fmt: skip
    torch.testing.assert_close(gathered, whole[:, -rows:])


# --- FixedSplit ---


@pytest.mark.slow_cases("dtype0-128", reason="0.3 s each")
@pytest.mark.parametrize("keys", [128, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_bits_of_a_row_do_not_depend_on_the_call(dtype: torch.dtype, keys: int) -> None:
    """Alone, among others, beside a prefill of 9 and of 10 tokens, with 1 and 16 queries, of pages 16 and 64."""
    tokens, heads, dim = 1153, 2, 32
    k, v = (random(3, 1216, heads, dim, seed=seed).to(dtype) for seed in (1, 2))
    q = random(3, 16, 8, dim).to(dtype)
    splits, lengths = FixedSplit(keys), ints(tokens, 700, 1216)
    alone = decode(q[:1, -1:], k[:1], v[:1], lengths[:1], splits=splits, return_lse=True)
    results = {"batched": decode(q[:, -1:], k, v, lengths, splits=splits, return_lse=True)}
    results["q_len 16"] = tuple(
        x[..., -1:, :, :] if x.ndim == 4 else x[..., -1:]
        for x in decode(q, k, v, lengths, splits=splits, return_lse=True)
    )
    for page in (16, 64):
        table = torch.arange(3 * 1216 // page, dtype=torch.int32).view(3, -1).flip(1).contiguous()
        pages = [torch.empty(3 * 1216 // page, page, heads, dim, dtype=dtype) for _ in range(2)]
        for cache, pool in zip((k, v), pages):
            pool[table.long()] = cache.view(3, -1, page, heads, dim)
        call = {"page_table": table, "splits": splits, "return_lse": True}
        results[f"page {page}"] = decode(q[:, -1:], *pages, lengths, **call)
        for prefill in (9, 10):
            rows = torch.cat([q[0, -1:], q[1, :prefill], q[2, -2:]])
            ends = ints(0, 1, 1 + prefill, 3 + prefill)
            o, lse = decode(rows, *pages, lengths, cu_seqlens_q=ends, max_seqlen_q=prefill, **call)
            results[f"page {page}, beside {prefill}"] = o[:1][None], lse[:, :1][None]
    for name, (o, lse) in results.items():
        assert torch.equal(o[:1], alone[0]), name
        assert torch.equal(lse[:1], alone[1]), name
