"""The operators on DTensors that are sharded on batch and heads: each rank computes its part, without communication.

q, k and v must have the same placements: on each dimension of the mesh ``Replicate()``, ``Shard`` of the batch, or
``Shard`` of the heads (of q's, and of the kv heads with them). o and lse get these placements, and so do dq, dk and dv.
A sink and a variant's tensors are cut to match; their gradients are ``Shard`` where they are cut, and ``Partial`` where
each rank has a part of a sum. Anything else is refused with an error.

:func:`register` uses ``register_torch_dispatch``, a public function of PyTorch, and not the private registry of DTensor
strategies: these cannot raise a refusal of their own, redistribute silently, and know no lists of tensors.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..variant.sharding import dims_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

BATCH, SEQUENCE, HEADS = 0, 1, 2  # dimensions of q, k and v
_OF_LSE = {BATCH: 0, HEADS: 1}  # where lse (batch, heads, seqlen_q) has them
_INDEX = {BATCH: "b", HEADS: "h"}
_TAKEN = "shard the batch or the heads of q, k and v, all three alike"


def register(forward: Any, backward: Any, of_forward: Callable[..., Any], of_backward: Callable[..., Any]) -> None:
    """Makes the two operators accept DTensors.

    Args:
        forward: the operator ``tileattn::forward``.
        backward: the operator ``tileattn::backward``.
        of_forward: the function whose signature `forward` has.
        of_backward: the function whose signature `backward` has.
    """
    from torch.distributed.tensor import DTensor

    for operator, function, run in ((forward, of_forward, _forward), (backward, of_backward, _backward)):
        operator.register_torch_dispatch(DTensor, _rule(inspect.signature(function), run))


def _rule(signature: inspect.Signature, run: Callable[..., Any]) -> Callable[..., Any]:
    def rule(cls: Any, func: Any, types: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Any:
        given = signature.bind(*args, **(kwargs or {}))
        given.apply_defaults()
        with torch.no_grad():  # autograd lies above: here DTensors are only taken apart and put together
            return run(func, given.arguments)

    return rule


class _Sharding(NamedTuple):
    """The mesh, and for each of its dimensions the dimension of q that it shards; None: replicated."""

    mesh: DeviceMesh
    dims: tuple[int | None, ...]

    def placements(self, where: Callable[[int], int | None], otherwise: Placement | None = None) -> list[Placement]:
        """Placements of a tensor that is cut along ``where(dim of q)``; `otherwise` where that is None."""
        from torch.distributed.tensor import Replicate, Shard

        cut = (None if dim is None else where(dim) for dim in self.dims)
        return [
            Shard(at) if at is not None else Replicate() if dim is None or otherwise is None else otherwise
            for dim, at in zip(self.dims, cut)
        ]

    def local(self, x: Tensor | None, where: Callable[[int], int | None]) -> Tensor | None:
        """This rank's part. A Replicate() or a plain tensor, whole on all ranks, is cut without communication."""
        from torch.distributed.tensor import DTensor, Replicate

        if x is None:
            return None
        x = x.detach()  # PyTorch 2.11 otherwise detaches the result in place, an operator that its DTensors lack
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, [Replicate()] * len(self.dims), run_check=False)
        return x.redistribute(self.mesh, self.placements(where)).to_local()

    def whole(self, x: Tensor, shape: Sequence[int], placements: list[Placement]) -> DTensor:
        """The DTensor of this shape, contiguous, from this rank's part."""
        from torch.distributed.tensor import DTensor

        stride = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        return DTensor.from_local(
            x, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
        )


# --- The two operators ---


def _forward(func: Any, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    sharding = _sharding_of(given)
    q, v = given["q"], given["v"]
    if given["needs_grad"]:
        _refuse_plain_leaves(given)
    local = given | _local_inputs(sharding, given)
    o, lse = func(**local)
    batch, seqlen_q, heads, _ = q.shape
    of_lse = sharding.placements(_OF_LSE.get)
    return (
        sharding.whole(o, (batch, seqlen_q, heads, v.shape[3]), sharding.placements(int)),
        sharding.whole(lse, (batch, heads, seqlen_q), of_lse),
    )


def _backward(func: Any, given: dict[str, Any]) -> list[Tensor]:
    from torch.distributed.tensor import Partial

    sharding = _sharding_of(given)
    local = given | _local_inputs(sharding, given)
    for name in ("do", "o"):
        local[name] = sharding.local(given[name], int)
    for name in ("dlse", "lse"):
        local[name] = sharding.local(given[name], _OF_LSE.get)
    inputs = [given[name] for name in "qkv"]
    cuts: list[Callable[[int], int | None]] = [int] * 3 + [_of_sink] + _cuts(given)
    wanted = [
        each for each, need in zip(zip([*inputs, given["sink"], *given["tensors"]], cuts), given["needs"]) if need
    ]
    computed = func(**local)
    return [
        sharding.whole(gradient, x.shape, sharding.placements(where, Partial()))
        for gradient, (x, where) in zip(computed, wanted, strict=True)
    ]


def _local_inputs(sharding: _Sharding, given: dict[str, Any]) -> dict[str, Any]:
    """This rank's parts of what both operators take."""
    local: dict[str, Any] = {name: sharding.local(given[name], int) for name in "qkv"}
    local["sink"] = sharding.local(given["sink"], _of_sink)
    cuts = zip(given["tensors"], _cuts(given))
    local["tensors"] = [sharding.local(x, where) for x, where in cuts]
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        local[name] = sharding.local(given[name], lambda _: None)
    return local


def _of_sink(dim: int) -> int | None:
    return 0 if dim == HEADS else None


def _cuts(given: dict[str, Any]) -> list[Callable[[int], int | None]]:
    """For each of the variant's tensors, its dimension that is cut with a dimension of q."""
    of_batch, of_heads = (dims_of(given["variant"], index) or (None,) * len(given["tensors"]) for index in "bh")
    return [{BATCH: b, HEADS: h}.get for b, h in zip(of_batch, of_heads)]


# --- What is refused ---


def _sharding_of(given: dict[str, Any]) -> _Sharding:
    """The sharding of q, k and v. Raises TypeError, ValueError or NotImplementedError for one that is not taken."""
    from torch.distributed.tensor import DTensor

    q, k, v = (given[name] for name in "qkv")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, DTensor):
            raise TypeError(f"q, k and v must all be DTensors or none, got {type(x).__name__} as {name}")
        if x.device_mesh != q.device_mesh:
            raise ValueError(f"q, k and v must be on one mesh, got {q.device_mesh} and {name} on {x.device_mesh}")
        dims = [_dim(name, placement) for placement in x.placements]
        if x.placements != q.placements:
            raise ValueError(
                f"q, k and v must have the same placements, got {q.placements} and {x.placements} of {name}: {_TAKEN}"
            )
    sharding = _Sharding(q.device_mesh, tuple(dims))
    _check_sizes(sharding, given)
    _check_options(sharding, given)
    return sharding


def _dim(name: str, placement: Placement) -> int | None:
    from torch.distributed.tensor import Replicate, Shard

    if type(placement) is Replicate:
        return None
    if type(placement) is Shard and placement.dim == SEQUENCE:
        raise NotImplementedError(
            f"{name} is sharded on the sequence, so that a rank does not have the keys that its queries see: use "
            f"tileattn.parallel.Plan for attention over several devices, or {_TAKEN}"
        )
    if type(placement) is Shard and placement.dim in (BATCH, HEADS):
        return placement.dim
    raise NotImplementedError(f"{name} has the placement {placement}, which tileattn does not take: {_TAKEN}")


def _check_sizes(sharding: _Sharding, given: dict[str, Any]) -> None:
    ranks = math.prod(sharding.mesh.size(i) for i, dim in enumerate(sharding.dims) if dim == HEADS)
    kv_heads = given["k"].shape[HEADS]
    if kv_heads % ranks:  # q's heads are a multiple of them
        raise ValueError(
            f"{ranks} ranks must have equal shares of the heads, got {kv_heads} heads of k and v: replicate the heads, "
            f"or repeat k's and v's"
        )
    if given["cu_seqlens_q"] is not None and BATCH in sharding.dims:
        raise ValueError("packed sequences must not be sharded but on their heads, got a Shard of the batch")


def _check_options(sharding: _Sharding, given: dict[str, Any]) -> None:
    if given["seed"] is not None:
        raise NotImplementedError(
            "dropout_p must be 0 with DTensors: which weights are dropped would depend on the placement"
        )
    if any(given.get(name) is not None for name in ("q_descale", "k_descale", "v_descale")):
        raise NotImplementedError("fp8 inputs with descales cannot be DTensors")
    for dim, which in ((BATCH, "batch"), (HEADS, "heads")):
        if dim in sharding.dims and dims_of(given["variant"], _INDEX[dim]) is None:
            raise NotImplementedError(
                f"the {which} cannot be sharded with this mask or score modification: it computes with "
                f"{_INDEX[dim]!r}, which a rank counts from 0 among its own; read a tensor at [{_INDEX[dim]}] instead"
            )


def _refuse_plain_leaves(given: dict[str, Any]) -> None:
    """Raises for a sink or a variant's tensor whose gradient would be a DTensor although the tensor is none."""
    from torch.distributed.tensor import DTensor

    for x in (given["sink"], *given["tensors"]):
        if x is not None and x.requires_grad and not isinstance(x, DTensor):
            raise TypeError(
                f"a sink or a tensor of a score modification that requires grad must be a DTensor where q is one, got "
                f"a plain tensor of shape {tuple(x.shape)}: use distribute_tensor(x, mesh, [Replicate(), ...])"
            )
