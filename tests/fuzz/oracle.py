"""The right outputs in float64, and the variance of their rounding error. Imports nothing of tileattn.

Attention and its gradients are written out by hand on whole matrices, (elements, heads, rows, keys); packed sequences
are padded first. Each output comes with the **variance** of its error. The model: each quantity that a kernel rounds is
off by a random part of one rounding, and equal numbers by the same part. This rule of tolerance needs no second
implementation. Kernels round the weights P and the gradients dS to the inputs' dtype before they multiply them, and o
and the gradients when they write them. They compute scores and sums in float32 (float64 for float64). A sum of n terms
is then off by sqrt(n) roundings of the root of its terms' sum of squares. Where there is no term, no error is allowed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .packing import Padding
from .spec import Call, tensor_dims
from .variants import Places, Scores, allowed, modified, tanh_error


class Truth(NamedTuple):
    """An output, and the variance of the error of each of its elements."""

    value: Tensor
    variance: Tensor


class Rounding(NamedTuple):
    """Relative errors of one rounding.

    inputs: of what is rounded to the inputs' dtype; smallest: the absolute error that there is at least.
    sums: of scores and sums. weights: of P. output: of o and the gradients. least: below it all numbers may be 0.
    tanh: of tanh, which kernels in bfloat16 take from the hardware.
    """

    inputs: float
    smallest: float
    sums: float
    weights: float
    output: float
    least: float
    tanh: float = 0.0


ROUNDINGS = {
    "fp64": Rounding(2.0**-53, 1e-300, 2.0**-53, 2.0**-53, 2.0**-53, 1e-150),
    "fp32": Rounding(2.0**-24, 1e-37, 2.0**-24, 2.0**-24, 2.0**-24, 1e-37),
    "bf16": Rounding(2.0**-8, 1e-37, 2.0**-24, 2.0**-8, 2.0**-8, 1e-37, 2.0**-10.5),
    "fp16": Rounding(2.0**-11, 2.0**-25, 2.0**-24, 2.0**-11, 2.0**-11, 1e-37),
    # Tensor cores add 8-bit products with some 13 bits; weights are e4m3, which ends at 2^-9.
    "fp8": Rounding(2.0**-8, 2.0**-10, 2.0**-14, 2.0**-4, 2.0**-8, 1e-37),
}


class Forward(NamedTuple):
    """A forward pass with what the backward pass needs; k and v have the queries' heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    at: Places
    scores: Scores
    seen: Tensor
    p: Tensor
    kept: Tensor | None
    sink_p: Tensor | None
    o: Tensor
    o_variance: Tensor
    lse: Tensor
    lse_variance: Tensor
    p_error2: Tensor


def truths(call: Call, t: dict[str, Tensor], kept: Tensor | None = None) -> dict[str, Truth]:
    """All outputs and gradients that the call asks for, by name.

    o and the gradients of q, k and v are (elements, seqlen, heads, head_dim), zeros beyond a packed sequence's end;
    lse is (elements, heads, rows), -inf there.

    Args:
        call: the call.
        t: its tensors; of fp8 calls q, k and v stand for what they represent.
        kept: under dropout, what weights are multiplied by, (elements, heads, rows, keys).
    """
    r = ROUNDINGS[call.dtype]
    padding = Padding(call, t)
    forward = _forward(call, t, padding, kept, r)
    by_name = {"o": Truth(forward.o, forward.o_variance)}
    if call.lse:
        by_name["lse"] = Truth(forward.lse, forward.lse_variance)
    if call.grads:
        by_name |= _gradients(call, t, padding, forward, r)
    return by_name


def _forward(call: Call, t: dict[str, Tensor], padding: Padding, kept: Tensor | None, r: Rounding) -> Forward:
    q, k, v = (
        padding.padded(t[name].to(call.torch_dtype) if call.autocast else t[name], name).double() for name in "qkv"
    )
    q = q.transpose(1, 2)
    k, v = (x.transpose(1, 2).repeat_interleave(call.group, dim=1) for x in (k, v))
    at = _places(call, padding)
    scale = call.scale_value
    # S = scale Q K^T
    scores = scale * (q @ k.mT)
    terms = (4 + call.head_dim) * (4 * r.sums**2)
    variance = terms * (scale**2 * (q.square() @ k.square().mT) + scores.square())
    changed = modified(call, t, at, scores, variance, r.sums, r.tanh)
    seen = (allowed(call, t, at) & padding.both).expand_as(scores) & (changed.value != -torch.inf)
    s = changed.value.masked_fill(~seen, -torch.inf)
    p, sink_p, lse = _softmax(s, t.get("sink"))
    lse = lse.masked_fill(~padding.rows_there[:, None, :], -torch.inf)
    variance = torch.where(seen, changed.variance, 0.0)
    # What each weight is off by, relatively: its score's error, and that of lse, which is their mean.
    score_error = (p * variance.sqrt()).sum(-1)
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    lse_variance = score_error.square() + (8 * r.sums * (1 + finite.abs())) ** 2
    p_error2 = variance + lse_variance[..., None] + (4 * r.sums) ** 2
    # O = P V
    dropped = p if kept is None else p * kept
    o = dropped @ v
    largest = p.amax(-1, keepdim=True) if call.keys else p.new_zeros(*p.shape[:3], 1)
    smallest = torch.where(seen, r.smallest * largest + r.least, 0.0)
    sums = 4 * r.sums**2 * (4 + call.keys)
    weight2 = dropped.square() * (r.weights**2 + sums + p_error2) + smallest.square()
    o_variance = weight2 @ v.square() + _tied(dropped, v, r.weights)
    o_variance = o_variance + (2 * r.output**2 + sums) * o.square() + _least2(o, r)
    return Forward(
        q, k, v, at, changed, seen, p, kept, sink_p, _rows_first(o), _rows_first(o_variance), lse,
        lse_variance, p_error2,
    )  # fmt: skip


def _least2(x: Tensor, r: Rounding) -> Tensor:
    """The variance of what is written: numbers that are not 0 have an absolute error at least."""
    return (x != 0).double() * r.smallest**2  # in float32, to which a Python number would lead, the square is 0


def _tied(a: Tensor, x: Tensor, rounding: float) -> Tensor:
    """What a x varies in addition to ``rounding**2 * (a**2 @ x**2)`` because equal elements of a row of a err equally.

    With one error e_g for each group g of equal a_j the variance is Var(e) sum_g (sum_(j in g) a_j x_j)^2. Let x_j be
    its mean X over the row, weighted by |a_j|, and a rest of random signs: that is Var(e) (sum_j a_j^2 (x_j - X)^2 +
    sum_j n_j a_j^2 X^2), where n_j counts the elements equal to a_j. The part with n_j - 1 is what independent errors
    lack. Var(e) is rounding^2 / 3, the variance of an error anywhere within one rounding: n errors that are one do not
    add up to more than one, and need no reserve. Elements are equal within an eighth of a rounding.
    """
    if a.numel() == 0:
        return a.new_zeros(())
    ordered, near = a.sort(dim=-1).values, a.abs() * (rounding / 8)
    equal = torch.searchsorted(ordered, a + near, right=True) - torch.searchsorted(ordered, a - near)
    mean = (a.abs() @ x) / a.abs().sum(-1, keepdim=True).clamp_min(1e-300)
    return rounding**2 / 3 * ((equal - 1) * a.square()).sum(-1, keepdim=True) * mean.square()


def _rows_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _places(call: Call, padding: Padding) -> Places:
    device = padding.row.device
    b = torch.arange(call.elements, device=device)[:, None, None, None]
    h = torch.arange(call.heads, device=device)[None, :, None, None]
    row, key = padding.row[None, None, :, None], padding.key[None, None, None, :]
    return Places(b, h, row, key, row + padding.offset[:, None, None, :])


def _softmax(s: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """The weights, that of the sink, and the log-sum-exp; 0 and -inf in rows that see nothing."""
    logits = s
    if sink is not None:
        column = sink.double()[None, :, None, None].expand(*s.shape[:3], 1)
        logits = torch.cat([s, column], dim=-1)
    if logits.shape[-1] == 0:
        return s, None, s.new_full(s.shape[:3], -torch.inf)
    lse = torch.logsumexp(logits, dim=-1)
    p = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return (p, None, lse) if sink is None else (p[..., :-1], p[..., -1], lse)


def _gradients(call: Call, t: dict[str, Tensor], padding: Padding, f: Forward, r: Rounding) -> dict[str, Truth]:
    do = padding.padded(t["do"], "do").double().transpose(1, 2)
    scale, p, kept = call.scale_value, f.p, f.kept
    # dP = dO V^T, delta = rowsum(dO O) - dlse, dS = P (dP - delta)
    of_weight = do @ f.v.mT
    error2 = 4 * r.sums**2 * (4 + call.head_dim_v) * (do.square() @ f.v.square().mT)
    if kept is not None:
        of_weight, error2 = of_weight * kept, error2 * kept.square()
    o, o_variance = f.o.transpose(1, 2), f.o_variance.transpose(1, 2)
    delta = (do * o).sum(-1, keepdim=True)
    delta2 = (do.square() * o_variance).sum(-1, keepdim=True) + 4 * r.sums**2 * delta.square()
    if call.dlse:
        dlse = padding.padded(t["dlse"].movedim(-1, -2), "do").double().transpose(1, 2)[..., None]
        delta, delta2 = delta - dlse, delta2 + 4 * r.sums**2 * dlse.square()
    inner = of_weight - delta
    ds = p * inner
    size = of_weight.abs() + delta.abs() + delta2.sqrt()
    # Normalised weights and dS have an absolute error, too: in float16 they are below its normal numbers. That of dS
    # joins where it is rounded, after the derivatives of modifications, which do not make it smaller.
    smallest = f.seen.double() * (r.smallest + r.least)
    own2 = ds.square() * (r.inputs**2 + f.p_error2) + p.square() * error2 + (smallest * size) ** 2
    by_name: dict[str, Truth] = {}
    if "sink" in call.grads and f.sink_p is not None:
        by_name["sink"] = _of_sink(f, delta[..., 0], delta2[..., 0], _written(t["sink"], r))
    if "v" in call.grads:
        dropped = p if kept is None else p * kept
        weight2 = dropped.square() * (r.weights**2 + f.p_error2) + smallest.square()
        by_name["v"] = _product(dropped.mT, weight2.mT, do, call, r)
    # Back through the modifications, the last one first.
    hidden, weight = ~f.seen, p
    for number, step in reversed(list(enumerate(f.scores.steps))):
        if step.tensor is not None and step.tensor in call.grads:
            assert step.by_tensor is not None
            by = step.by_tensor.expand_as(p).masked_fill(hidden, 0.0)
            written = _written(t[step.tensor], r)
            there2 = own2 + smallest.square()
            by_name[step.tensor] = _of_tensor(ds, there2, weight, delta2, by, tensor_dims(call.mods[number]), written)
        local: Tensor | float = step.derivative
        if isinstance(local, Tensor):
            local = local.expand_as(p).masked_fill(hidden, 0.0)
        own2 = own2 * local * local + (ds * step.by_tanh * (tanh_error(r.sums) + r.tanh)).square()
        ds, weight = ds * local, weight * local
    own2 = own2 + smallest.square()
    ds, own2, weight = ds * scale, own2 * scale**2, weight * scale
    if "q" in call.grads:
        by_name["q"] = _of_q(ds, own2, weight, delta2, f, r)
    if "k" in call.grads:
        by_name["k"] = _product(ds.mT, (own2 + weight.square() * delta2).mT, f.q, call, r)
    return by_name


def _of_q(ds: Tensor, own2: Tensor, p: Tensor, delta2: Tensor, f: Forward, r: Rounding) -> Truth:
    """dQ = dS K. An error of delta is the same for all keys of a row: its parts add up, as those of lse do."""
    dq = ds @ f.k
    sums = 4 * r.sums**2 * (4 + ds.shape[-1])
    variance = (own2 + sums * ds.square()) @ f.k.square() + _tied(ds, f.k, r.inputs) + delta2 * (p @ f.k).square()
    variance = variance + (r.output**2 + sums + f.lse_variance[..., None]) * dq.square() + _least2(dq, r)
    return Truth(_rows_first(dq), _rows_first(variance))


def _product(a: Tensor, a2: Tensor, x: Tensor, call: Call, r: Rounding) -> Truth:
    """a x, summed over the query heads of a group: dV = P^T dO, dK = dS^T Q."""
    sums = 4 * r.sums**2 * (4 + a.shape[-1] * call.group)
    variance = (a2 + sums * a.square()) @ x.square()
    value, variance = (y.unflatten(1, (call.kv_heads, call.group)).sum(2) for y in (a @ x, variance))
    variance = variance + (r.output**2 + sums) * value.square() + _least2(value, r)
    return Truth(_rows_first(value), _rows_first(variance))


def _written(x: Tensor, r: Rounding) -> Rounding:
    """The gradient of x is rounded to x's dtype."""
    own = torch.finfo(x.dtype)
    return r._replace(output=max(r.output, own.eps / 2), smallest=max(r.smallest, own.smallest_normal * own.eps))


def _of_sink(f: Forward, delta: Tensor, delta2: Tensor, r: Rounding) -> Truth:
    """The sink is a key with a value of 0: dsink = -sum of its weight times delta."""
    assert f.sink_p is not None
    value = -(f.sink_p * delta).sum((0, 2))
    variance = (
        f.sink_p.square() * (delta2 + delta.square() * (f.lse_variance + (8 * r.sums) ** 2)) + (r.least * delta) ** 2
    )
    return Truth(value, variance.sum((0, 2)) + (r.output * value) ** 2 + _least2(value, r))


def _of_tensor(ds: Tensor, own2: Tensor, p: Tensor, delta2: Tensor, by: Tensor, dims: str, r: Rounding) -> Truth:
    """The gradient of a modification's tensor: dS times the derivative by it, summed over broadcast dimensions."""
    value, variance = ds * by, own2 * by.square()
    over = [axis for axis, dim in enumerate("bhqk") if dim not in dims]
    if "k" in dims:
        variance = variance + p.square() * delta2 * by.square()
        over.sort()
    else:
        value, variance = value.sum(-1, keepdim=True), variance.sum(-1, keepdim=True)
        variance = variance + delta2 * (p * by).sum(-1, keepdim=True).square()
    if over:
        value, variance = value.sum(over, keepdim=True), variance.sum(over, keepdim=True)
    shape = [size for size, dim in zip(value.shape, "bhqk") if dim in dims]
    full = [1 if dim == "1" else shape.pop(0) for dim in dims]
    value, variance = value.reshape(full), variance.reshape(full)
    return Truth(value, variance + (r.output * value) ** 2 + _least2(value, r))
