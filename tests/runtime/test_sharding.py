"""tileattn's operators on DTensors: two gloo processes run all cases, and the tests look at their results.

The expected results are those of one device: sharding on batch and heads changes no sum but that of gradients which
ranks add up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tileattn
from tests.tools.ranks.processes import on_ranks, once
from tileattn.testing import assert_accurate
from tileattn.variant.key import encode, normalize
from tileattn.variant.sharding import dims_of

BATCH, HEADS = 0, 2
DOCUMENTS = [[0] * 4 + [1] * 5, [0] * 7 + [1] * 2, [0] * 9]


def tensors(batch: int = 2) -> dict[str, Tensor]:
    """float64, so that only a wrong element differs."""
    torch.manual_seed(0)
    shapes = {"q": (batch, 9, 4, 16), "k": (batch, 9, 2, 16), "v": (batch, 9, 2, 8), "do": (batch, 9, 4, 8)}
    shapes |= {"sink": (4,), "slopes": (4,), "bias": (batch, 4, 9, 9), "of_lse": (batch, 4, 9)}
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def plain(q: Tensor, k: Tensor, v: Tensor, **_: Tensor) -> tuple[Tensor, Tensor]:
    return tileattn.attention(q, k, v, mask=tileattn.SlidingWindow(5, 0), return_lse=True)


def with_operands(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, slopes: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    mods = [tileattn.ALiBi(slopes), tileattn.Bias(bias)]
    ids = torch.tensor(DOCUMENTS[: q.shape[0]])
    return tileattn.attention(
        q, k, v, causal=True, mask=tileattn.Documents(ids), score_mod=mods, sink=sink, return_lse=True
    )


def of_bhsd(q: Tensor, k: Tensor, v: Tensor, **_: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o, lse = tileattn.attention(q, k, v, causal=True, layout="bhsd", return_lse=True)
    return o.transpose(1, 2), lse


def packed(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, **_: Tensor) -> tuple[Tensor, Tensor]:
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    q, k, v = (x[0] for x in (q, k, v))
    o, lse = tileattn.varlen_attention(q, k, v, ends, ends, 5, 5, causal=True, sink=sink, return_lse=True)
    return o[None], lse[None]


# A call, its batch, the dimensions of q that the mesh (of one or two dimensions) shards.
CASES: dict[str, tuple[Callable[..., Any], int, list[int | None]]] = {
    "batch": (plain, 2, [BATCH]),
    "heads": (plain, 2, [HEADS]),
    "neither": (plain, 2, [None]),
    "batch, with tensors": (with_operands, 2, [BATCH]),
    "heads, with tensors": (with_operands, 2, [HEADS]),
    "a batch of three": (with_operands, 3, [BATCH]),
    "a batch of one": (with_operands, 1, [BATCH]),
    "bhsd": (of_bhsd, 2, [HEADS]),
    "packed": (packed, 1, [HEADS]),
    "two dimensions of the mesh": (with_operands, 2, [None, HEADS]),
}


def outcome(call: Callable[..., Any], given: dict[str, Tensor], do: Tensor, of_lse: Tensor) -> dict[str, Tensor]:
    """o, lse, and gradients; a leaf that a call does not use has none."""
    leaves = {name: x.requires_grad_() for name, x in given.items()}
    o, lse = call(**leaves)
    ((o * do).sum() + (lse * of_lse).sum()).backward()
    found = {"o": o.detach(), "lse": lse.detach()}
    return found | {f"d{name}": x.grad for name, x in leaves.items() if x.grad is not None}


def alone(name: str) -> dict[str, Tensor]:
    call, batch, _ = CASES[name]
    given = tensors(batch)
    do, of_lse = given.pop("do"), given.pop("of_lse")
    return outcome(call, given, do, of_lse)


# --- On the ranks ---


def results(rank: int, ranks: int) -> dict[str, Any]:
    return {name: sharded(name, ranks) for name in CASES} | {"errors": errors(ranks)}


def mesh_of(ranks: int, dims: int = 1) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (1,) * (dims - 1) + (ranks,))


def distributed(x: Tensor, mesh: Any, dims: list[int | None]) -> Tensor:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    return distribute_tensor(x, mesh, [Replicate() if dim is None else Shard(dim) for dim in dims])


def sharded(name: str, ranks: int) -> dict[str, tuple[Tensor, str]]:
    """The whole tensors and their placements."""
    call, batch, dims = CASES[name]
    mesh, nothing = mesh_of(ranks, len(dims)), [None] * len(dims)
    given = tensors(batch)
    of_lse: list[int | None] = [{BATCH: 0, HEADS: 1}.get(dim) for dim in dims]
    do, weights = distributed(given.pop("do"), mesh, nothing), distributed(given.pop("of_lse"), mesh, of_lse)
    placed = {each: distributed(x, mesh, dims if each in "qkv" else nothing) for each, x in given.items()}
    found: dict[str, Any] = outcome(call, placed, do, weights)
    return {each: (x.full_tensor(), str(x.placements)) for each, x in found.items()}


def compiled(rank: int, ranks: int) -> dict[str, tuple[Tensor, str]]:
    """The case "heads" under torch.compile, as one graph."""
    call = torch.compile(plain, fullgraph=True, backend="aot_eager")
    mesh, given = mesh_of(ranks), tensors()
    placed = {each: distributed(given[each], mesh, [HEADS]) for each in "qkv"}
    found: dict[str, Any] = outcome(
        call, placed, distributed(given["do"], mesh, [None]), distributed(given["of_lse"], mesh, [None])
    )
    return {each: (x.full_tensor(), str(x.placements)) for each, x in found.items()}


def errors(ranks: int) -> dict[str, str]:
    mesh, given = mesh_of(ranks), tensors()
    q, k, v = (given[name] for name in "qkv")

    def call(*dims: int | None, **options: Any) -> Callable[[], Any]:
        inputs = [distributed(x, mesh, [dim]) for x, dim in zip((q, k, v), dims)]
        return lambda: tileattn.attention(*inputs, **options)

    odd = [distributed(x[:, :, :n], mesh, [HEADS]) for x, n in ((q, 3), (k, 1), (v, 1))]
    leaf = {"sink": given["sink"].requires_grad_()}
    mixed = [distributed(q, mesh, [HEADS]), k, v]
    ends = torch.tensor([0, 2], dtype=torch.int32)
    rows = [distributed(x[:, 0], mesh, [1]) for x in (q, k, v)]
    calls = {
        "sequence": call(1, 1, 1),
        "head_dim": call(3, 3, 3),
        "unlike": call(HEADS, None, HEADS),
        "uneven": lambda: tileattn.attention(*odd),
        "mixed": lambda: tileattn.attention(*mixed),
        "heads in a function": call(HEADS, HEADS, HEADS, score_mod=lambda score, b, h, q, k: score + h),
        "batch in a function": call(BATCH, BATCH, BATCH, mask=lambda b, h, q, k: k <= q + b),
        "dropout": call(BATCH, BATCH, BATCH, dropout_p=0.1),
        "a plain leaf": call(HEADS, HEADS, HEADS, **leaf),
        "packed rows": lambda: tileattn.varlen_attention(*(x.transpose(0, 1) for x in rows), ends, ends, 2, 2),
    }
    return {name: text_of(each) for name, each in calls.items()}


def text_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    first, second = once(tmp_path_factory, "sharding", lambda: on_ranks(results, 2, seconds=60))
    for name in CASES:
        for each, (whole, placements) in first[name].items():
            assert torch.equal(whole, second[name][each][0]), (name, each)
            assert placements == second[name][each][1], (name, each)
    return dict(first)


# --- The tests ---


@pytest.mark.parametrize("name", CASES)
def test_sharded_calls_give_what_one_device_gives(name: str, found: dict[str, Any]) -> None:
    check(found[name], alone(name))


@pytest.mark.slow  # importing Dynamo on each rank takes seconds
def test_a_compiled_call() -> None:
    for found in on_ranks(compiled, 2, seconds=60):
        check(found, alone("heads"))


def check(found: dict[str, tuple[Tensor, str]], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for each, (got, _) in found.items():
        # Sums of ranks are in another order: one device's result is the oracle, and its rounding the error.
        rounded = expected[each] * (1 + torch.finfo(torch.float64).eps)
        assert_accurate(each, got, expected[each], [rounded], gradient=each.startswith("d"), size=expected[each].abs())


S0, S1, S2, SUM = "(Shard(dim=0),)", "(Shard(dim=1),)", "(Shard(dim=2),)", "(Partial(sum),)"
PLACEMENTS = {
    "batch, with tensors": {
        "o": S0, "lse": S0, "dq": S0, "dk": S0, "dv": S0, "dsink": SUM, "dslopes": SUM, "dbias": S0,
    },
    "heads, with tensors": {
        "o": S2, "lse": S1, "dq": S2, "dk": S2, "dv": S2, "dsink": S0, "dslopes": S0, "dbias": S1,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PLACEMENTS)
def test_placements_are_those_of_the_inputs(name: str, found: dict[str, Any]) -> None:
    assert {each: placements for each, (_, placements) in found[name].items()} == PLACEMENTS[name]


ERRORS = {
    "sequence": "NotImplementedError: q is sharded on the sequence, so that a rank does not have the keys that its "
    "queries see: use tileattn.parallel.Plan for attention over several devices",
    "head_dim": "NotImplementedError: q has the placement S(3), which tileattn does not take",
    "unlike": "ValueError: q, k and v must have the same placements, got (Shard(dim=2),) and (Replicate(),) of k",
    "uneven": "ValueError: 2 ranks must have equal shares of the heads, got 1 heads of k and v",
    "mixed": "TypeError: q, k and v must all be DTensors or none, got Tensor as k",
    "heads in a function": "NotImplementedError: the heads cannot be sharded with this mask or score modification: it "
    "computes with 'h'",
    "batch in a function": "NotImplementedError: the batch cannot be sharded with this mask or score modification: it "
    "computes with 'b'",
    "dropout": "NotImplementedError: dropout_p must be 0 with DTensors",
    "a plain leaf": "TypeError: a sink or a tensor of a score modification that requires grad must be a DTensor",
    "packed rows": "NotImplementedError: q is sharded on the sequence",
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_is_refused(name: str, found: dict[str, Any]) -> None:
    assert found["errors"][name].startswith(ERRORS[name])


# --- Which dimension of a variant's tensors is divided ---


def key_of(mask: Any, mods: Any = None) -> str:
    return encode(*normalize(mask, mods, False))[0]


def test_dimensions_that_are_read_at_an_index() -> None:
    table, slopes = torch.zeros(2, 9, 9), torch.zeros(4)
    key = key_of(lambda b, h, q, k: table[b, q, k] > 0, [tileattn.ALiBi(slopes), tileattn.SoftCap(3.0)])
    assert dims_of(key, "b") == (0, None)
    assert dims_of(key, "h") == (None, 0)
    assert dims_of(key_of(tileattn.Causal()), "b") == ()
    # A dimension of size 1 is broadcast, and not cut.
    assert dims_of(key_of(None, tileattn.Bias(torch.zeros(1, 4, 9, 9))), "b") == (None,)


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, k: k <= q + h,
        lambda b, h, q, k: torch.zeros(9)[h + 1] > 0,
        lambda b, h, q, k: (torch.ones(9)[h] > 0) & (h < 2),
    ],
)
def test_other_uses_of_an_index_cannot_be_divided(mask: Any) -> None:
    assert dims_of(key_of(mask), "h") is None
    assert dims_of(key_of(mask), "b") is not None
