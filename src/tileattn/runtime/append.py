"""The way of an append call: checks, the choice of a backend, the operator ``tileattn::append_kv``.

Eager calls look up a prepared function by the call's metadata, so that arguments are checked once for each combination
of metadata; only addresses and the tensors' values differ between calls that share one. Traced calls (torch.compile,
torch.export, fake tensors) use the operator, which declares that it mutates the caches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call.append_validation import check_append, check_overlap
from ..call.appending import AppendInputs, make_append_call
from ..call.memory import extent
from ..call.scalars import as_flag
from .append_dispatch import Append, prepare_append
from .operators import is_traced, refuse_transforms
from .tables import facts, kept

_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))
_K_CACHE, _V_CACHE = map(AppendInputs._fields.index, ("k_cache", "v_cache"))
_NEW = tuple(map(AppendInputs._fields.index, ("k", "v", "q")))
_ROWS = ("k", "v", "positions", "q", "q_positions")  # packed, without a batch dimension
_PREPARED: dict[tuple[Any, ...], _Prepared] = {}


def run_append(inputs: AppendInputs, interleaved: bool, backend: str | None) -> Tensor | None:
    """Writes into the caches and returns the rotated q, or None; the arguments are as the user gave them."""
    if not _is_plain(inputs):
        refuse_transforms("tileattn.append_kv")
        check_append(inputs)
        rotated = append_kv(*inputs[:9], as_flag("interleaved", interleaved), *inputs[9:], backend)
        return None if inputs.q is None else rotated
    return _run(inputs, interleaved, backend)


def _run(inputs: AppendInputs, interleaved: bool, backend: str | None) -> Tensor | None:
    grad = torch.is_grad_enabled()
    try:
        addresses, metadata = [], []
        for x in inputs:
            address = 0 if x is None else x.data_ptr()
            addresses.append(address)
            metadata.append(None if x is None else (facts(x), x.requires_grad, address % 16))
        key = (*metadata, interleaved, type(interleaved), backend, grad)
        prepared = _PREPARED.get(key)
    except (TypeError, RuntimeError, AttributeError):  # an argument of a wrong type: the checks raise
        _prepare(inputs, interleaved, backend)
        raise
    if prepared is None:
        prepared = kept(_PREPARED, key, _prepare(inputs, interleaved, backend))
    return prepared(inputs, addresses)


def _prepare(inputs: AppendInputs, interleaved: Any, backend: str | None) -> _Prepared:
    check_append(inputs)
    return _Prepared(inputs, as_flag("interleaved", interleaved), backend)


def _is_plain(inputs: AppendInputs) -> bool:
    """Whether all tensors are plain ones in eager execution, outside of torch.func."""
    return (
        not is_traced(inputs.k)
        and _PLAIN.issuperset(map(type, inputs))
        and not torch._C._are_functorch_transforms_active()
    )


class _Prepared:
    """A checked call, for tensors with the same metadata."""

    def __init__(self, inputs: AppendInputs, interleaved: bool, backend: str | None) -> None:
        self.packed = inputs.cu_seqlens_q is not None
        self.detaches = any(x is not None and x.requires_grad for x in inputs)  # kernels take no such tensors
        inputs = self._with_batch(inputs)
        self.append: Append = prepare_append(make_append_call(inputs, interleaved), backend)
        self.extents = [0 if x is None else extent(x) for x in inputs]
        self.known_distances: set[int] = set()  # between caches that share no element
        self.new = [(i, self.extents[i]) for i in _NEW if inputs[i] is not None]

    def __call__(self, inputs: AppendInputs, addresses: list[int]) -> Tensor | None:
        if self._may_overlap(addresses):
            check_overlap(inputs)
            self.known_distances.add(addresses[_V_CACHE] - addresses[_K_CACHE])
        if self.detaches:
            inputs = AppendInputs._make(None if x is None else x.detach() for x in inputs)
        rotated = self.append(self._with_batch(inputs))
        # Tensors made in inference mode have no version.
        caches = [cache for cache in (inputs.k_cache, inputs.v_cache) if not cache.is_inference()]
        torch.autograd.graph.increment_version(caches)
        return rotated.squeeze(0) if self.packed and rotated is not None else rotated

    def _may_overlap(self, addresses: list[int]) -> bool:
        """Whether the ranges of addresses of a cache and another tensor meet, unless the caches' distance is known."""
        k, v = addresses[_K_CACHE], addresses[_V_CACHE]
        k_end, v_end = k + self.extents[_K_CACHE], v + self.extents[_V_CACHE]
        if k < v_end and v < k_end and v - k not in self.known_distances:
            return True
        for i, size in self.new:
            begin, end = addresses[i], addresses[i] + size
            if (begin < k_end and k < end) or (begin < v_end and v < end):
                return True
        return False

    def _with_batch(self, inputs: AppendInputs) -> AppendInputs:
        """Packed tensors with one batch element."""
        if not self.packed:
            return inputs
        given = {name: getattr(inputs, name) for name in _ROWS}
        return inputs._replace(**{name: x.unsqueeze(0) for name, x in given.items() if x is not None})


# --- The operator ---


def _append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seqlens_k: Tensor,
    page_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    positions: Tensor | None,
    q: Tensor | None,
    q_positions: Tensor | None,
    backend: str | None,
) -> Tensor:
    """The operator: :func:`tileattn.append_kv` with all arguments by place; without q the result is an empty tensor."""
    inputs = AppendInputs(
        k, v, k_cache, v_cache, seqlens_k, page_table, cu_seqlens_q, cos, sin, positions, q, q_positions
    )
    with torch.no_grad():
        rotated = _run(inputs, interleaved, backend)
    return k.new_empty(0) if rotated is None else rotated


append_kv = torch.library.custom_op("tileattn::append_kv", _append_kv, mutates_args=("k_cache", "v_cache"))


@append_kv.register_fake
def _(k, v, k_cache, v_cache, seqlens_k, page_table, cu, cos, sin, interleaved, positions, q, *_):
    return k.new_empty(0) if q is None else q.new_empty(q.shape)
