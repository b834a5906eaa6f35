"""The kernels that `tileattn warmup --model` compiles: those that `compat.transformers` asks for with a model.

The layers of a model call `attention`, `varlen_attention` and `decode` with few variants, which follow from how inputs
are batched and which cache there is. tests/bench/test_warmup_model.py compares them with the calls of real models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from tileattn.bench import warmup
from tileattn.bench.cases import DTYPES
from tileattn.bench.model_config import LayerKind
from tileattn.call.decoding import DecodeCall
from tileattn.call.facts import AttentionCall, BackwardCall
from tileattn.kernels.tilelang.build.batch import AnyJob
from tileattn.kernels.tilelang.decode.library import PackedKeysJob
from tileattn.runtime.decoding import page_rows_of
from tileattn.runtime.few_queries import MOST_ROWS
from tileattn.variant.key import encode, normalize
from tileattn.variant.masks import Documents, KeyPadding, Mask, SlidingWindow
from tileattn.variant.scores import SoftCap

# How the sequences of a batch come: of one length; with a padding mask; packed in a row, with cu_seq_lens or with
# position_ids that begin anew.
INPUTS = ("plain", "padded", "packed", "documents")
BATCHES = (1, 2)  # a mask's tensors of one row are read by other kernels than those of many rows


def masks(inputs: str) -> list[Mask | None]:
    """What the inputs add to the mask of each layer."""
    if inputs == "padded":
        return [KeyPadding(torch.ones(batch, 8, dtype=torch.bool)) for batch in BATCHES]
    if inputs == "documents":
        return [Documents(torch.zeros(batch, 8, dtype=torch.int64)) for batch in BATCHES]
    return [None]


def variant(kind: LayerKind, mask: Mask | None, causal: bool) -> str:
    """The key of a variant with the layers' cap."""
    return encode(*normalize(mask, [SoftCap(1.0)] if kind.cap else None, causal))[0]


def prefill_calls(kind: LayerKind, inputs: Sequence[str], dtype: str, arch: str) -> list[AttentionCall]:
    """The calls of a text as a whole, without gradients: causal, and windowed where the text is longer than the window.

    Args:
        kind: of the layers.
        inputs: of :data:`INPUTS`.
        dtype: a key of :data:`tileattn.bench.cases.DTYPES`.
        arch: of the device.
    """
    base = _base(kind, dtype, arch)
    calls = []
    for each in inputs:
        for key in _causal_variants(kind, each):
            calls.append(replace(base, variant=key, packed=each == "packed"))
    return list(dict.fromkeys(calls))


def training_calls(kind: LayerKind, inputs: Sequence[str], dtype: str, arch: str) -> list[BackwardCall]:
    """The backward passes of the same calls, with the gradients of q, k, v and of sinks."""
    wanted = []
    for call in prefill_calls(kind, inputs, dtype, arch):
        tensors = call.variant.count("t:")  # of masks, which have no gradient
        needs = (True, True, True, kind.sink, *(False,) * tensors)
        wanted.append(BackwardCall(replace(call, needs_grad=True, return_lse=True), needs))
    return wanted


def step_calls(
    kind: LayerKind, inputs: Sequence[str], dtype: str, arch: str
) -> tuple[list[DecodeCall], list[AttentionCall]]:
    """The calls of generation steps, on dynamic and static caches: those of decode kernels, and of forward kernels.

    On a dynamic cache a single query sees all keys, or all that its window has left in the cache. A forward kernel runs
    it while there are few keys. With more than `MOST_ROWS` query heads to a key/value head it always does.
    """
    seen = [mask for each in inputs for mask in masks(each) if each in ("plain", "padded")]
    all_keys = [variant(kind, mask, causal=False) for mask in seen]
    forward = [replace(_base(kind, dtype, arch), variant=key) for key in all_keys]
    if kind.group > MOST_ROWS:
        return [], forward
    static = [_step_variant(kind, mask, windowed) for mask in seen for windowed in (False, True)[: 1 + kind.window]]
    return [_decode_call(call, forward[0]) for call in dict.fromkeys([*all_keys, *static])], forward


def paged_calls(
    kind: LayerKind, page_sizes: Sequence[int], dtype: str, arch: str
) -> tuple[list[DecodeCall], list[AttentionCall]]:
    """The calls of continuous batching: steps over pages (with a window, over gathered keys), and packed prompts."""
    key = variant(kind, SlidingWindow(1, 0), causal=True) if kind.window else variant(kind, None, causal=True)
    packed = replace(_base(kind, dtype, arch), variant=key, packed=True)
    if kind.group > MOST_ROWS:
        return [], [packed]
    step = replace(_decode_call(key, packed), packed=True)
    if kind.window:
        return [replace(step, packed_keys=True)], [packed]
    return [replace(step, page_rows=page_rows_of(size)) for size in page_sizes], [packed]


def decode_jobs(wanted: Sequence[DecodeCall]) -> list[AnyJob]:
    """The kernels of these decode calls."""
    of_keys: list[AnyJob] = [PackedKeysJob(call.arch) for call in wanted if call.packed_keys]
    return [*warmup.decode_jobs(wanted), *of_keys[:1]]


def _base(kind: LayerKind, dtype: str, arch: str) -> AttentionCall:
    return AttentionCall(DTYPES[dtype], kind.head_dim, kind.head_dim_v, sink=kind.sink, return_lse=False, arch=arch)


def _causal_variants(kind: LayerKind, inputs: str) -> Iterator[str]:
    for mask in masks(inputs):
        yield variant(kind, mask, causal=True)
        if kind.window:
            window = SlidingWindow(1, 0)
            yield variant(kind, window if mask is None else window & mask, causal=False)


def _step_variant(kind: LayerKind, mask: Mask | None, windowed: bool) -> str:
    """The variant of a step on a static cache, in whose slots a window is one of positions."""
    window: Mask | None = SlidingWindow(1, 0) if windowed else None
    both = window if mask is None else mask if window is None else window & mask
    return variant(kind, both, causal=not windowed)


def _decode_call(key: str, like: AttentionCall) -> DecodeCall:
    dims = like.dtype, like.head_dim, like.head_dim_v
    return DecodeCall(*dims, variant=key, sink=like.sink, return_lse=False, arch=like.arch)
