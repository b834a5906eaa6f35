"""The error of gradients: float64 gradients on the quantised inputs, for all heads or a sample of them.

With S the modified and masked scores, P = softmax(S) and O = P V, for one head:

    dV = P^T dO,    dP = dO V^T,    dS from dP,    dQ = scale dS K,    dK = scale dS^T Q

Autograd computes dS, through the softmax and the score modifications, and the gradient of a bias. Query rows are taken
in chunks. A sample leaves out whole heads, because dK and dV of a key sum over all query rows and over all query heads
that share it.

As in `output`, the same code in the inputs' own dtype is eager PyTorch: it rounds what eager rounds (scores,
probabilities, dP, dS, and each query head's dK and dV). Its error varies by chance, so there are four runs, and the
worst counts: with sums over head dims forwards and backwards, and with dS in two ways. Autograd computes rowsum(P * dP)
from a rounded dP. Fused kernels compute rowsum(dO * O), mathematically the same, from a rounded O, and do not round dP.
The two differ in rows that see few keys, where large numbers cancel in dQ. In the first row of a causal mask dQ is
zero: autograd's way is exact there, the other is not. So an error of dQ is relative to the size of its terms where that
is larger, as in `tileattn.testing.oracle.oracle_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, product

import torch
from torch import Tensor

from tileattn.bench.cases import Case
from tileattn.bench.oracle import output as oracle
from tileattn.bench.oracle.output import Sample
from tileattn.bench.problem import Problem
from tileattn.testing.numerics import assert_accurate, row_error

# A score costs about as much as this many of the forward pass.
COST = 4


@dataclass(frozen=True)
class GradientOracle:
    """The expected gradients of the sampled heads in float64, and those of several runs of eager PyTorch.

    Both are by name in the order of `Problem.inputs`: dq (batches, heads, seqlen_q, head_dim), dk and dv (batches,
    kv_heads, seqlen_k, head_dim or head_dim_v), dbias (batches or 1, heads or 1, seqlen_q, seqlen_k). `sizes` has the
    size of the terms of dq, in its shape; the others sum over many queries.
    """

    problem: Problem
    sample: Sample
    expected: dict[str, Tensor]
    sizes: dict[str, Tensor]
    eager: Sequence[dict[str, Tensor]]

    def error(self, gradients: Sequence[Tensor]) -> float:
        """The largest relative error of a row over all gradients, as `testing.numerics` measures it.

        gradients: In the order and the shapes of `Problem.inputs`. NaN if any checked value is NaN.
        """
        checked = self.sampled(gradients)
        errors = [
            row_error(checked[name], self.expected[name], gradient=True, size=self.sizes.get(name)).worst_row
            for name in checked
        ]
        # Not `max`, which loses a NaN that is not the first.
        return float(torch.tensor(errors, dtype=torch.float64).max())

    def check(self, gradients: Sequence[Tensor]) -> None:
        """Asserts the tolerance rule."""
        for name, got in self.sampled(gradients).items():
            runs = [run[name] for run in self.eager]
            assert_accurate(name, got, self.expected[name], runs, gradient=True, size=self.sizes.get(name))

    def sampled(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        """The checked part of the gradients, in the shapes of the expected ones."""
        case, heads = self.problem.case, self.sample.heads
        kv_heads = _kv_heads(case, heads)
        given = dict(zip(self.problem.inputs(), gradients, strict=True))
        picked = {
            name: torch.stack([oracle.take(given[name][b], of) for b in self.sample.batches])
            for name, of in (("dq", heads), ("dk", kv_heads), ("dv", kv_heads))
        }
        if "dbias" in given:
            for_batches, for_heads = _of_bias(self.problem, self.sample)
            picked["dbias"] = given["dbias"][list(for_batches)][:, list(for_heads)]
        return picked


@torch.no_grad()
def build(problem: Problem, most: int | None = None) -> GradientOracle:
    """Computes the checked gradients of a problem, in float64 and in its own dtype. most: As for `sample`."""
    chosen = sample(problem.case, problem.q.device, most)
    exact, sizes = _gradients(problem, chosen, _Way(torch.float64, _plainly, sizes=True))
    ways = [_Way(problem.q.dtype, *way) for way in product((_plainly, _by_delta), (False, True))]
    return GradientOracle(problem, chosen, exact, sizes, [_gradients(problem, chosen, way)[0] for way in ways])


def sample(case: Case, device: torch.device, most: int | None = None) -> Sample:
    """The heads to check: all if affordable, else the first and last batch element, then the first and last kv head.

    If batch elements or heads share a bias, its gradient sums over all of them, so none is left out.

    most: The number of scores that is affordable, if not `SCORES_CHECKED`. Where even the first and last are too many,
    only the last is left.
    """
    batches, kv_heads = tuple(range(case.batch)), tuple(range(case.kv_heads))
    group = case.heads // case.kv_heads
    bias = (case.terms.bias or "") if case.terms.dbias else "bh"
    left = (most or oracle.SCORES_CHECKED[device.type]) // (COST * group * case.seqlen_q * case.seqlen_k)
    if len(batches) * len(kv_heads) > left and "b" in bias:
        batches = oracle.ends(batches)
    if len(batches) * len(kv_heads) > left and "h" in bias:
        kv_heads = oracle.ends(kv_heads)
    if most is not None and len(batches) * len(kv_heads) > left and not case.terms.dbias:
        batches, kv_heads = batches[-1:], kv_heads[-1:]
    heads = tuple(chain.from_iterable(range(h * group, (h + 1) * group) for h in kv_heads))
    rows = torch.arange(case.seqlen_q, device=device)
    if len(batches) * len(heads) == case.batch * case.heads:
        return Sample(batches, heads, rows, "all rows")
    text = f"all rows of batch elements {oracle.listed(batches)}, kv heads {oracle.listed(kv_heads)}"
    return Sample(batches, heads, rows, text)


def _kv_heads(case: Case, heads: Sequence[int]) -> tuple[int, ...]:
    """The kv heads of these query heads, each once."""
    return tuple(dict.fromkeys(h // (case.heads // case.kv_heads) for h in heads))


def _of_bias(problem: Problem, chosen: Sample) -> tuple[Sequence[int], Sequence[int]]:
    """The checked batch elements and heads of the bias."""
    assert problem.bias is not None
    batch, heads = problem.bias.shape[:2]
    return (chosen.batches if batch > 1 else (0,)), (chosen.heads if heads > 1 else (0,))


@dataclass(frozen=True)
class _Way:
    """One way to compute gradients: the dtype, and whether sums over the head dims run backwards.

    softmax: from logits, probabilities, dO and V of some rows to the gradient of the logits.
    sizes: whether the size of dQ's terms is computed, too.
    """

    dtype: torch.dtype
    softmax: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    backwards: bool = False
    sizes: bool = False

    def tensor(self, x: Tensor, heads: Sequence[int]) -> Tensor:
        """(seqlen, heads, dim) -> (chosen heads, seqlen, dim)."""
        x = oracle.take(x, heads).to(self.dtype)
        return x.flip(-1) if self.backwards else x

    @property
    def sums(self) -> torch.dtype:
        """In which products add up."""
        return torch.promote_types(self.dtype, torch.float32)


def _gradients(problem: Problem, chosen: Sample, way: _Way) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The sampled gradients, and the sizes of terms that the way computes; both by name."""
    dbias = _no_dbias(problem, chosen, way.sums)
    parts: list[tuple[Tensor, ...]] = []
    sizes: list[Tensor] = []
    for place, b in enumerate(chosen.batches):
        into = None if dbias is None else dbias[place if len(dbias) > 1 else 0]
        gradients, size = _of_batch_element(problem, chosen, b, way, into)
        parts.append(gradients)
        if size is not None:
            sizes.append(size)
    found = {name: torch.stack(of) for name, of in zip(("dq", "dk", "dv"), zip(*parts, strict=True), strict=True)}
    if dbias is not None:
        found["dbias"] = dbias.to(way.dtype)
    return found, {"dq": torch.stack(sizes)} if sizes else {}


def _no_dbias(problem: Problem, chosen: Sample, dtype: torch.dtype) -> Tensor | None:
    """Zeros to which the gradients of the bias are added, if they are wanted."""
    if "dbias" not in problem.inputs():
        return None
    batches, heads = map(len, _of_bias(problem, chosen))
    shape = (batches, heads, problem.case.seqlen_q, problem.case.seqlen_k)
    return problem.q.new_zeros(shape, dtype=dtype)


def _of_batch_element(
    problem: Problem, chosen: Sample, b: int, way: _Way, dbias: Tensor | None
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """(dq, dk, dv) of batch element b, and the size of the terms of dq if it is wanted.

    dbias: (heads or 1, seqlen_q, seqlen_k), to which the gradient of the bias is added.
    """
    case = problem.case
    assert problem.do is not None
    shared = [h // (case.heads // case.kv_heads) for h in chosen.heads]
    q, do = (way.tensor(x[b], chosen.heads) for x in (problem.q, problem.do))
    k, v = (way.tensor(x[b], shared) for x in (problem.k, problem.v))
    dq, size = torch.empty_like(q), torch.empty_like(q if way.sizes else q[:0])
    dk, dv = (torch.zeros_like(x, dtype=way.sums) for x in (k, v))
    for rows in oracle.chunks(problem, chosen):
        scores = (q[:, rows] @ k.mT * problem.scale).requires_grad_()
        bias = oracle.bias_rows(problem, b, chosen.heads, rows)
        inputs = [scores]
        if bias is not None and dbias is not None:
            # One for each head, though heads may share it: a gradient's sum is to be seen.
            bias = bias.to(way.dtype).expand(scores.shape).contiguous().requires_grad_()
            inputs.append(bias)
        with torch.enable_grad():
            logits, empty = oracle.logits(problem, scores, b, chosen.heads, rows, bias)
            leaf = logits.detach().requires_grad_()
            p = oracle.probabilities(leaf, empty, case.seqlen_k)
        dlogits = way.softmax(leaf, p, do[:, rows], v)
        ds, *of_bias = torch.autograd.grad(logits, inputs, dlogits, retain_graph=way.sizes)
        if way.sizes:
            terms = torch.autograd.grad(logits, scores, _size_of_terms(logits, p, do[:, rows], v))[0]
            size[:, rows] = terms * problem.scale @ k
        if dbias is not None:
            dbias[:, rows] += of_bias[0].to(dbias.dtype).sum_to_size(len(dbias), *ds.shape[1:])
        ds = ds * problem.scale
        dq[:, rows] = ds @ k
        dk += ds.mT.to(dk.dtype) @ q[:, rows].to(dk.dtype)
        dv += p.detach().mT.to(dv.dtype) @ do[:, rows].to(dv.dtype)
    # Query heads that share a key and a value: each rounds its own part.
    dk, dv = (x.to(way.dtype).unflatten(0, (-1, case.heads // case.kv_heads)).sum(dim=1) for x in (dk, dv))
    if way.backwards:
        dq, dk, dv, size = (x.flip(-1) for x in (dq, dk, dv, size))
    return (dq, dk, dv), size if way.sizes else None


def _plainly(logits: Tensor, p: Tensor, do: Tensor, v: Tensor) -> Tensor:
    """P * (dP - rowsum(P * dP)): autograd's way, of which p is a function of the logits."""
    return torch.autograd.grad(p, logits, do @ v.mT)[0]


def _by_delta(logits: Tensor, p: Tensor, do: Tensor, v: Tensor) -> Tensor:
    """P * (dP - rowsum(dO * O)), from O as it is returned: FlashAttention's way, in which dP is not rounded."""
    p = p.detach()
    o, do, v = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (p @ v, do, v))
    delta = (do * o).sum(dim=-1, keepdim=True)
    return _of_logits(logits, p * (do @ v.mT - delta))


def _size_of_terms(logits: Tensor, p: Tensor, do: Tensor, v: Tensor) -> Tensor:
    """The same formula, with the size of the terms of each inner product in its place: what does not cancel."""
    p = p.detach()
    delta = ((do * (p @ v)) ** 2).sum(dim=-1, keepdim=True).sqrt()
    return _of_logits(logits, p * ((do**2 @ (v**2).mT).sqrt() + delta))


def _of_logits(logits: Tensor, of_keys: Tensor) -> Tensor:
    """The gradient of all logits, of which those of keys come first. A sink's stays zero: it is not checked."""
    dlogits = torch.zeros_like(logits)
    dlogits[..., : of_keys.shape[-1]] = of_keys
    return dlogits
