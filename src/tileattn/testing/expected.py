"""The expected results of a conformance case, dense or packed: o, lse and gradients of the oracle and of eager.

Packed sequences are computed one by one, as dense calls with one batch element. In rows that belong to no sequence, o
and gradients are 0 and lse is -inf.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..call.dropout import draw_seed, keep_mask, weight_of_kept
from ..variant.masks import FunctionMask, Mask
from ..variant.scores import Bias
from ..variant.sparse.blocks import for_call
from .call_arguments import DROPOUT_SEED, Arguments
from .oracle import eager_attention, eager_gradients, oracle_attention, oracle_gradients

Forward = tuple[tuple[Tensor, Tensor], tuple[list[Tensor], list[Tensor]]]
Gradients = tuple[dict[str, Tensor], list[dict[str, Tensor]], dict[str, Tensor]]


def expected_forward(arguments: Arguments) -> Forward:
    """The oracle's and eager's (o, lse), as `assert_forward_accurate` takes them."""
    if arguments.packed is None:
        return oracle_attention(*arguments.positional), eager_attention(*arguments.positional)
    oracles, eagers = [], []
    for each in _sequences(arguments):
        oracles.append(oracle_attention(*each.forward))
        eagers.append(eager_attention(*each.forward))
    runs = range(len(eagers[0][0]) if eagers else 1)
    return (
        (_joined_o([o for o, _ in oracles], arguments), _joined_lse([lse for _, lse in oracles], arguments)),
        (
            [_joined_o([o[run] for o, _ in eagers], arguments) for run in runs],
            [_joined_lse([lse[run] for _, lse in eagers], arguments) for run in runs],
        ),
    )


def expected_gradients(arguments: Arguments, do: Tensor, dlse: Tensor | None) -> Gradients:
    """The oracle's and eager's gradients and the sizes of their terms, as `assert_gradients_accurate` takes them."""
    exact, leaves = arguments.double()
    of_eager = arguments.leaves()
    if arguments.packed is None:
        oracle, sizes = oracle_gradients(leaves, do, dlse, *exact.positional[:7])
        return oracle, eager_gradients(of_eager, do, dlse, *arguments.positional[:7]), sizes
    total, total_size = _zeros(leaves), _zeros(leaves)
    of_runs: list[dict[str, Tensor]] = []
    for one, rounded in zip(_sequences(exact, leaves), _sequences(arguments, of_eager)):
        outputs = do[:, one.rows], None if dlse is None else dlse[..., one.rows]
        oracle, sizes = oracle_gradients(one.leaves, *outputs, *one.backward)
        one.add(total, oracle)
        one.add(total_size, {name: size**2 for name, size in sizes.items()})
        runs = eager_gradients(rounded.leaves, *outputs, *rounded.backward)
        of_runs = of_runs or [_zeros(of_eager) for _ in runs]
        for of_run, run in zip(of_runs, runs, strict=True):
            rounded.add(of_run, run)
    return total, of_runs or [_zeros(of_eager)], {name: square.sqrt() for name, square in total_size.items()}


def _zeros(leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros(x.shape, dtype=x.dtype, device=x.device) for name, x in leaves.items()}


class _Sequence:
    """One sequence of a packed case as a dense call; its q, k and v are leaves of their own."""

    def __init__(self, arguments: Arguments, leaves: Mapping[str, Tensor], number: int, rows: slice, keys: slice):
        self.rows = rows
        self.places = {"dq": rows, "dk": keys, "dv": keys}
        own = {
            name: x.detach()[:, place].requires_grad_()
            for (name, place), x in zip(self.places.items(), (arguments.q, arguments.k, arguments.v))
        }
        self.leaves = {name: own.get(name, x) for name, x in leaves.items()}
        lengths = rows.stop - rows.start, keys.stop - keys.start
        one = replace(
            arguments,
            q=own["dq"],
            k=own["dk"],
            v=own["dv"],
            mask=_numbered(_in_call(arguments, *lengths), number),
            score_mods=tuple(of_sequence(mod, number, *lengths) for mod in arguments.score_mods),
            packed=None,
        )
        dropout = _dropout(arguments, number, *lengths) if arguments.dropout_p else None
        # What the oracle's and eager's functions take: behind the leaves and outputs' gradients, of a backward pass.
        self.forward = (*one.positional, dropout)
        self.backward = (*one.positional[:7], dropout)

    def add(self, totals: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
        """Adds gradients of this sequence to those of the whole call."""
        for name, gradient in gradients.items():
            place = self.places.get(name)
            part = totals[name] if place is None else totals[name][:, place]
            part += gradient


def _sequences(arguments: Arguments, leaves: Mapping[str, Tensor] | None = None) -> Iterator[_Sequence]:
    assert arguments.packed is not None
    cu_seqlens_q, cu_seqlens_k, *_ = arguments.packed
    ends = itertools.pairwise(cu_seqlens_q.tolist()), itertools.pairwise(cu_seqlens_k.tolist())
    for number, (rows, keys) in enumerate(zip(*ends)):
        yield _Sequence(arguments, leaves or {}, number, slice(*rows), slice(*keys))


def _in_call(arguments: Arguments, rows: int, keys: int) -> Mask | None:
    """The mask of a packed call, for a sequence with so many rows and keys."""
    q, k, packed = arguments.q, arguments.k, arguments.packed
    assert packed is not None
    sequences = packed.cu_seqlens_q.shape[0] - 1
    return for_call(
        arguments.mask,
        lambda: (sequences, q.shape[2], k.shape[2], packed.max_seqlen_q, packed.max_seqlen_k),
        lambda: keys - rows,
    )


def _numbered(mask: Mask | None, number: int) -> Mask | None:
    """The mask as that of one sequence, whose number in a dense call is 0."""
    return mask and FunctionMask(lambda b, h, q, k: mask.allows(b + number, h, q, k))


def of_sequence(mod: Callable[..., Any], number: int, rows: int, keys: int) -> Callable[..., Any]:
    """A modification as that of one sequence."""
    if isinstance(mod, Bias):
        batch = 0 if mod.tensor.shape[0] == 1 else number
        rows = 1 if mod.tensor.shape[2] == 1 else rows
        return Bias(mod.tensor[batch : batch + 1, :, :rows, :keys])
    return lambda score, b, h, q, k: mod(score, b + number, h, q, k)


def _dropout(arguments: Arguments, number: int, rows: int, keys: int) -> Tensor:
    """What the probabilities of a sequence are multiplied by."""
    torch.manual_seed(DROPOUT_SEED)
    seed = draw_seed(arguments.q.device)
    p, heads = arguments.dropout_p, arguments.q.shape[2]
    kept = keep_mask(seed, p, slice(number, number + 1), heads, slice(0, rows), slice(0, keys))
    return kept.double() * weight_of_kept(p)


def _joined_o(parts: Sequence[Tensor], arguments: Arguments) -> Tensor:
    """(1, total_q, heads, head_dim_v): 0 where no sequence is."""
    _, total, heads, _ = arguments.q.shape
    if not parts:
        return torch.zeros(1, total, heads, arguments.v.shape[3], dtype=torch.float64, device=arguments.q.device)
    o = torch.cat([*parts], dim=1)
    return torch.cat([o, o.new_zeros(1, total - o.shape[1], *o.shape[2:])], dim=1)


def _joined_lse(parts: Sequence[Tensor], arguments: Arguments) -> Tensor:
    """(1, heads, total_q): -inf where no sequence is."""
    _, total, heads, _ = arguments.q.shape
    behind = total - sum(lse.shape[2] for lse in parts)
    nothing = torch.full((1, heads, behind), -torch.inf, dtype=torch.float64, device=arguments.q.device)
    return torch.cat([*parts, nothing.to(parts[0].dtype) if parts else nothing], dim=2)
