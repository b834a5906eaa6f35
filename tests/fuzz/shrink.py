"""The smallest call that still fails: options are dropped one by one, then sizes are halved, as long as it fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from .spec import PACKED_ADAPTERS, Call, mod_tensor

PLAIN = Call()
# Fields in the order in which they are dropped: first what changes the call most.
DROPPED = (
    "compiled", "autocast", "poisoned", "deterministic", "bucket", "dropout", "sink", "key_padding", "dlse", "lse",
    "layout", "scale", "causal", "tail", "slack", "values", "q_size", "v_size", "strides", "bias_aligned", "dtype",
    "adapter",
)  # fmt: skip
SIZES = ("batch", "seqlen_q", "seqlen_k", "kv_heads", "group", "head_dim", "head_dim_v")


def shrink(call: Call, fails: Callable[[Call], bool], seconds: float, same_kernels: bool = False) -> Call:
    """The smallest call found within `seconds`; with `same_kernels` only what compiles nothing new is tried."""
    end = time.monotonic() + seconds
    smaller_fails = True
    while smaller_fails:
        smaller_fails = False
        for smaller in _smaller(call, same_kernels):
            if time.monotonic() > end:
                return call
            if _is_call(smaller) and fails(smaller):
                call, smaller_fails = smaller, True
                break
    return call


def _smaller(call: Call, same_kernels: bool) -> Iterator[Call]:
    if not same_kernels:
        yield from _without_options(call)
    yield from _sizes(call, same_kernels)
    for name in ("values", "q_size", "v_size", "poisoned", "tail", "slack"):
        if getattr(call, name) != getattr(PLAIN, name):
            yield call.replace(**{name: getattr(PLAIN, name)})


def _without_options(call: Call) -> Iterator[Call]:
    if call.mask is not None:
        yield call.replace(mask=None)
        if call.mask[0] in ("and", "or"):
            yield call.replace(mask=call.mask[1])
            yield call.replace(mask=call.mask[2])
    for number in range(len(call.mods)):
        yield without_mod(call, number)
    if len(call.grads) > 0:
        yield call.replace(grads=(), dlse=False)
        for name in call.grads:
            if len(call.grads) > 1:
                yield call.replace(grads=tuple(other for other in call.grads if other != name))
    if call.packed and call.elements:
        lengths = {"seqlen_q": max(call.lengths_q), "seqlen_k": max(call.lengths_k), "batch": call.elements}
        yield call.replace(adapter="attention", lengths_q=None, lengths_k=None, tail=0, slack=0, **lengths)
    for name in DROPPED:
        if getattr(call, name) == getattr(PLAIN, name) or (name == "adapter" and call.packed):
            continue
        changes: dict[str, Any] = {name: getattr(PLAIN, name)}
        if name == "lse":
            changes["dlse"] = False
        if name == "sink":
            changes["grads"] = tuple(each for each in call.grads if each != "sink")
        if name == "adapter":
            changes |= {"module": None, "top": False}
        yield call.replace(**changes)
    for place, stride in enumerate(call.strides):
        if stride != "dense":
            yield call.replace(strides=(*call.strides[:place], "dense", *call.strides[place + 1 :]))


def without_mod(call: Call, number: int) -> Call:
    """Without one modification; the tensors behind it, and their gradients, are renumbered."""
    names = {}
    for old, mod in enumerate(call.mods):
        name = mod_tensor(old, mod)
        if name is not None and old != number:
            names[name] = mod_tensor(old - (old > number), mod)
        elif name is not None:
            names[name] = None
    grads = tuple(new for each in call.grads if (new := names.get(each, each)))
    return call.replace(mods=call.mods[:number] + call.mods[number + 1 :], grads=grads)


def _sizes(call: Call, same_kernels: bool) -> Iterator[Call]:
    if call.packed:
        yield from _lengths(call)
    names = [name for name in SIZES if not (same_kernels and name.startswith("head_dim"))]
    for name in names:
        size = getattr(call, name)
        for less in dict.fromkeys((1, size // 2, size * 3 // 4, size - 1)):
            if 0 < less < size:
                yield call.replace(**{name: less})
    for both in ("seqlen_q", "seqlen_k"), ("head_dim", "head_dim_v"):
        sizes = [getattr(call, name) for name in both]
        if not (same_kernels and both[0] == "head_dim") and sizes[0] == sizes[1] > 1:
            for less in dict.fromkeys((1, sizes[0] // 2, sizes[0] * 3 // 4, sizes[0] - 1)):
                yield call.replace(**dict.fromkeys(both, less))


def _lengths(call: Call) -> Iterator[Call]:
    pairs = list(zip(call.lengths_q, call.lengths_k))
    for place in range(len(pairs)):
        others = pairs[:place] + pairs[place + 1 :]
        yield call.replace(lengths_q=tuple(q for q, _ in others), lengths_k=tuple(k for _, k in others))
        q, k = pairs[place]
        for smaller in ((q // 2, k // 2), (q - 1, k - 1), (q // 2, k), (q, k // 2), (q - 1, k), (q, k - 1)):
            if smaller != (q, k) and min(smaller) >= 0:
                new = [*pairs[:place], smaller, *pairs[place + 1 :]]
                yield call.replace(lengths_q=tuple(q for q, _ in new), lengths_k=tuple(k for _, k in new))


def _is_call(call: Call) -> bool:
    """Whether the call is one that its adapter takes: what is drawn always is."""
    same = call.seqlen_q == call.seqlen_k and (not call.packed or call.lengths_q == call.lengths_k)
    if call.adapter in ("nn", "fa_qkv", "fa_varlen_qkv", "padded") and not same:
        return False
    if call.adapter == "torch_sdpa" and call.causal and not same:
        return False
    if (call.adapter in ("nn", "torch_sdpa") or call.adapter[:2] == "fa") and call.head_dim != call.head_dim_v:
        return False
    if call.adapter in ("fa_qkv", "fa_varlen_qkv") and call.group > 1:
        return False
    needs_module = call.adapter in ("nn", "reference")
    return needs_module == (call.module is not None) and call.packed == (call.adapter in PACKED_ADAPTERS)
