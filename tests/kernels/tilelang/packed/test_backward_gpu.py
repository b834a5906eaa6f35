"""What only a GPU can show of packed sequences' backward pass, beside conformance: ``pytest -m gpu``."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tileattn
from tests.kernels.tilelang.packed import test_forward_gpu as forward
from tests.kernels.tilelang.packed.test_forward_gpu import (
    EDGES,
    LONG_TAIL,
    SIMILAR,
    WRONG,
    Guarded,
    Packing,
    cu_seqlens,
)
from tests.tools.conformance_call import run
from tileattn import ALiBi, Bias, Causal, SlidingWindow, SoftCap
from tileattn.kernels.tilelang.backward import library as backward_launch
from tileattn.kernels.tilelang.forward import library as launch
from tileattn.testing import (
    ConformanceCase,
    assert_gradients_accurate,
    build,
    expected_gradients,
    gradients,
    output_gradients,
)
from tileattn.testing.call_arguments import Structure
from tileattn.testing.shapes import PackedShape

pytestmark = pytest.mark.gpu

Grads = dict[str, Tensor]


class Training(NamedTuple):
    """A call with gradients; `mod` makes a modification of a tensor whose gradient is wanted."""

    packing: Packing
    mod: Callable[[Packing], Any] | None = None
    dlse: bool = False
    dropout_p: float = 0.0

    def arguments(self, seed: int = 0) -> dict[str, Any]:
        """The arguments of `varlen_attention`: q, k, v and a sink require grad."""
        arguments = self.packing.arguments(seed)
        for name in ("q", "k", "v", "sink"):
            if arguments[name] is not None:
                arguments[name].requires_grad_()
        if self.mod is not None:
            arguments["score_mod"] = self.mod(self.packing)
        return arguments | {"dropout_p": self.dropout_p}

    def outputs_gradients(self, seed: int = 0) -> tuple[Tensor, Tensor | None]:
        """do and dlse; behind the last sequence they are NaN."""
        (heads, _), (_, head_dim_v), rows = self.packing.heads, self.packing.head_dims, sum(self.packing.lengths_q)
        generator = None if forward.DEVICE == "meta" else torch.Generator(forward.DEVICE).manual_seed(seed + 100)
        shape = (rows + self.packing.behind, heads)
        do = torch.randn((*shape, head_dim_v), device=forward.DEVICE, generator=generator).bfloat16()
        dlse = torch.randn(shape, device=forward.DEVICE, generator=generator).T.contiguous()
        do[rows:], dlse[:, rows:] = torch.nan, torch.nan
        return do, dlse if self.dlse else None

    def run(self, seed: int = 0, **options: Any) -> Grads:
        return train(self.arguments(seed), *self.outputs_gradients(seed), **options)


def leaves(arguments: dict[str, Any]) -> dict[str, Tensor]:
    """What a gradient is wanted of: q, k, v, a sink, and the tensor of a modification."""
    named = {name: arguments[name] for name in ("q", "k", "v", "sink")}
    mod = arguments["score_mod"]
    named["tensor"] = getattr(mod, "slopes", getattr(mod, "tensor", None))
    return {name: x for name, x in named.items() if isinstance(x, Tensor) and x.requires_grad}


def train(arguments: dict[str, Any], do: Tensor, dlse: Tensor | None, **options: Any) -> Grads:
    if arguments["dropout_p"]:
        torch.manual_seed(0)
    o, lse = forward.attend(**arguments, **options)
    outputs, grads = ((o,), (do,)) if dlse is None else ((o, lse), (do, dlse))
    wanted = leaves(arguments)
    return dict(zip(wanted, torch.autograd.grad(outputs, list(wanted.values()), grads)))


def _slopes(packing: Packing) -> ALiBi:
    return ALiBi(torch.linspace(0.01, 0.2, packing.heads[0], device=forward.DEVICE).requires_grad_())


def _bias(packing: Packing, sequences: int) -> Bias:
    """NaN behind the ends of each sequence, where nothing is read. One bias for all sequences is finite."""
    longest = max(packing.lengths_q), max(packing.lengths_k)
    shape = (sequences, packing.heads[0], *longest)
    bias = torch.linspace(-2, 2, sequences * packing.heads[0] * longest[0] * longest[1], device=forward.DEVICE)
    bias = bias.sin().view(shape).bfloat16()
    if sequences > 1:
        for number, (rows, keys) in enumerate(zip(packing.lengths_q, packing.lengths_k)):
            bias[number, :, rows:] = torch.nan
            bias[number, :, :, keys:] = torch.nan
    return Bias(bias.requires_grad_())


def _own_bias(packing: Packing) -> Bias:
    return _bias(packing, len(packing.lengths_q))


def _shared_bias(packing: Packing) -> Bias:
    return _bias(packing, 1)


TRAININGS = {
    "causal": Training(Packing(mask=Causal(), behind=77)),
    "causal-64": Training(Packing(head_dims=(64, 64), mask=Causal(), behind=1), dlse=True),
    "full": Training(Packing(sink=True, behind=300), dlse=True),
    "similar": Training(Packing(SIMILAR, SIMILAR, (24, 24), behind=5)),
    "similar-256": Training(Packing(SIMILAR, tuple(reversed(SIMILAR)), (8, 4), (256, 256), behind=1)),
    "causal-256": Training(Packing(heads=(4, 4), head_dims=(256, 256), mask=Causal(), behind=3)),
    "window-192/128": Training(Packing(head_dims=(192, 128), mask=SlidingWindow(100, 20))),
    "window-96": Training(Packing(head_dims=(96, 96), mask=SlidingWindow(100, 0), behind=2)),
    "cross": Training(Packing(EDGES, tuple(reversed(EDGES)), (8, 2), mask=Causal(), sink=True, behind=3), dlse=True),
    "decode": Training(Packing((1,) * 65, tuple(range(0, 1300, 20)), (16, 2), mask=Causal())),
    "softcap": Training(Packing(mask=Causal(), score_mod=lambda heads: SoftCap(20.0), behind=9)),
    "alibi": Training(Packing(EDGES, EDGES, (8, 2), mask=Causal(), behind=1), _slopes),
    "own-bias": Training(Packing(EDGES, EDGES, (2, 2), behind=4), _own_bias),
    "shared-bias": Training(Packing(EDGES, tuple(reversed(EDGES)), (2, 1), (64, 64)), _shared_bias),
    "dropout": Training(Packing(mask=Causal(), behind=8), dropout_p=0.2),
    # The generic schedule: no TMA for head dims that differ so, or with the gradient of a tensor.
    "generic": Training(Packing(head_dims=(256, 128), mask=Causal(), sink=True, behind=9)),
    "generic-alibi-256": Training(Packing(EDGES, EDGES, (4, 2), (256, 256), behind=2), _slopes),
}
GRAPHED, QUEUED = TRAININGS["causal"], TRAININGS["similar"]
DETERMINISTIC = ("causal", "full", "causal-256", "window-192/128", "cross", "alibi", "own-bias", "shared-bias")
DETERMINISTIC += ("dropout", "generic", "generic-alibi-256")


def calls() -> Iterator[Callable[[], Any]]:
    """All calls whose kernels these tests need, for benchmarks/precompile.py."""
    for name, training in TRAININGS.items():
        yield training.run
        if name in (*DETERMINISTIC, *ALONE):
            yield lambda training=training: training.run(deterministic=True)  # type: ignore[misc]
    for case in edge_cases():
        yield lambda case=case: _edge_case(case)  # type: ignore[misc]
    yield Training(Packing((1, 3), (1, 3), (1, 1), (64, 64))).run


# --- Results ---


def edge_cases() -> list[ConformanceCase]:
    shapes = [
        PackedShape("edges", 4, 2, EDGES, EDGES, behind=70),
        PackedShape("crossed", 4, 1, EDGES, (*EDGES[5:], *EDGES[:5]), behind=1),
        PackedShape("long-tail", 2, 1, LONG_TAIL, LONG_TAIL, behind=130),
    ]
    structures = [
        Structure("bf16", dim, dim_v, mask, (), sink, True)
        for dim, dim_v in ((64, 64), (128, 128), (256, 256), (192, 128))
        for mask, sink in (("none", False), ("causal", True))
    ]
    structures += [
        Structure("bf16", 128, 128, mask, scores, False, True)
        for mask, scores in (
            ("window", ("softcap",)),
            ("causal", ("alibi_b",)),
            ("none", ("bias_bh",)),
            ("documents", ("bias",)),
        )
    ]
    cases = [ConformanceCase(structure, shape) for structure in structures for shape in shapes]
    unaligned = [replace(shape, layout="unaligned") for shape in shapes]
    return cases + [
        ConformanceCase(Structure("bf16", 128, 128, "causal", (), False, False), each) for each in unaligned
    ]


def _edge_case(case: ConformanceCase) -> tuple[Any, ...]:
    arguments = build(case, forward.DEVICE)
    leaves, (do, dlse) = arguments.leaves(), output_gradients(case, arguments)
    return arguments, do, dlse, gradients(run(arguments, "tilelang"), leaves, do, dlse)


@pytest.mark.parametrize("case", edge_cases(), ids=lambda case: case.id)
def test_sequences_that_end_where_tiles_do(case: ConformanceCase) -> None:
    arguments, do, dlse, got = _edge_case(case)
    assert_gradients_accurate(case.id, got, *expected_gradients(arguments, do, dlse), case.dtype)


def _owner(lengths: tuple[int, ...]) -> Tensor:
    """The number of the sequence of each row."""
    numbers = torch.arange(len(lengths), device=forward.DEVICE)
    return torch.repeat_interleave(numbers, torch.tensor(lengths, device=forward.DEVICE))


ALONE = ("causal", "causal-64", "similar", "similar-256", "window-192/128", "decode", "softcap", "generic")


@pytest.mark.parametrize("name", ALONE)
def test_nothing_leaks_from_a_sequence_into_its_neighbours(name: str) -> None:
    """Every other sequence is NaN, its gradients of outputs as well; those of the others have the bits as without."""
    training = TRAININGS[name]
    arguments, (do, dlse) = training.arguments(), training.outputs_gradients()
    expected = train(arguments, do, dlse, deterministic=True)
    of_q, of_k = _owner(training.packing.lengths_q), _owner(training.packing.lengths_k)
    owners = {"q": of_q, "k": of_k, "v": of_k}
    for parity in (0, 1):
        spoilt: dict[str, Any] = {name: arguments[name].detach().clone() for name in "qkv"}
        spoilt_do, spoilt_dlse = do.clone(), None if dlse is None else dlse.clone()
        for name, owner in owners.items():
            spoilt[name][: len(owner)][owner % 2 == parity] = torch.nan
            spoilt[name].requires_grad_()
        spoilt_do[: len(of_q)][of_q % 2 == parity] = torch.nan
        if spoilt_dlse is not None:
            spoilt_dlse[:, : len(of_q)][:, of_q % 2 == parity] = torch.nan
        for deterministic in (False, True):
            got = train(arguments | spoilt, spoilt_do, spoilt_dlse, deterministic=deterministic)
            for name, owner in owners.items():
                mine = owner % 2 != parity
                assert_same(
                    {name: got[name][: len(mine)][mine]}, {name: expected[name][: len(mine)][mine]}, deterministic
                )
                assert (got[name][len(mine) :] == 0).all()


def assert_same(again: Grads, first: Grads, deterministic: bool) -> None:
    """The same bits, but for sums by atomic operations, which are close."""
    for name in first:
        if name in ("q", "tensor") and not deterministic:
            scale = max(float(first[name].abs().max()), 1e-3)
            torch.testing.assert_close(again[name], first[name], rtol=2**-6, atol=scale * 2**-8)
        else:
            assert torch.equal(again[name], first[name]), name


class GuardedShapes(Guarded):
    """The same for sizes that are given as one tuple."""

    def __call__(self, like: Tensor, *size: Any, dtype: torch.dtype | None = None) -> Tensor:
        return super().__call__(like, *(size[0] if size and not isinstance(size[0], int) else size), dtype=dtype)


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Guarded:
    shapes = GuardedShapes()
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *size, **named: shapes(self, *size, **named))
    return shapes


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("name", ["causal", "full", "similar-256", "cross", "decode", "alibi", "generic"])
def test_every_row_is_written_and_nothing_else(name: str, deterministic: bool, guarded: Guarded) -> None:
    """Outputs and workspaces are NaN before, and have margins."""
    training = TRAININGS[name]
    got = training.run(deterministic=deterministic)
    guarded.assert_untouched()
    assert all(gradient.isfinite().all() for gradient in got.values())
    for leaf, lengths in (("q", training.packing.lengths_q), ("k", training.packing.lengths_k)):
        assert (got[leaf][sum(lengths) :] == 0).all()


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_deterministic_gradients_have_the_same_bits(name: str) -> None:
    training = TRAININGS[name]
    arguments, outputs = training.arguments(), training.outputs_gradients()
    first = train(arguments, *outputs, deterministic=True)
    assert_same(train(arguments, *outputs), first, False)
    for _ in range(20):
        assert_same(train(arguments, *outputs, deterministic=True), first, True)


def test_sequences_without_queries_or_keys() -> None:
    training = Training(Packing((0, 5, 0, 70), (3, 0, 0, 0), (4, 2), sink=True, behind=2), dlse=True)
    training = training._replace(packing=training.packing._replace(longest=128))
    got = training.run()
    assert all((got[name] == 0).all() for name in "qkv")
    # lse is the sink where there are no keys.
    _, dlse = training.outputs_gradients()
    assert dlse is not None
    torch.testing.assert_close(got["sink"], dlse[:, :75].sum(1))


def test_offsets_beyond_two_to_the_31_elements() -> None:
    """The last sequence's rows begin beyond what 32 bits can say."""
    training = Training(Packing((64,), (256,), (1, 1), (64, 64)))
    small, (do, _) = training.arguments(), training.outputs_gradients()
    lengths_q, lengths_k = (2**20, 64), (1, 256)
    wide = torch.zeros((sum(lengths_q), 33, 64), device=forward.DEVICE, dtype=torch.bfloat16)
    wide[-64:, 32:] = small["q"].detach()
    k, v = (torch.cat([x[:1], x]).detach().requires_grad_() for x in (small["k"], small["v"]))
    long_do = torch.zeros((sum(lengths_q), 1, 64), device=forward.DEVICE, dtype=torch.bfloat16)
    long_do[-64:] = do
    lengths = {"cu_seqlens_q": cu_seqlens(lengths_q), "cu_seqlens_k": cu_seqlens(lengths_k)}
    longest = {"max_seqlen_q": 2**20, "max_seqlen_k": 256}
    large = small | {"q": wide[:, 32:].requires_grad_(), "k": k, "v": v} | lengths | longest
    got, expected = train(large, long_do, None), train(small, do, None)
    for name, rows in (("q", 64), ("k", 256), ("v", 256)):
        assert_same({name: got[name][-rows:]}, {name: expected[name]}, False)


# --- Launches ---


@pytest.mark.parametrize("name", TRAININGS)
def test_hundred_launches_give_the_same_gradients(name: str) -> None:
    """Races would show as outliers."""
    training = TRAININGS[name]
    arguments, (do, dlse) = training.arguments(), training.outputs_gradients()
    o, lse = forward.attend(**arguments)
    wanted = leaves(arguments)
    outputs, grads = ((o,), (do,)) if dlse is None else ((o, lse), (do, dlse))
    runs = [torch.autograd.grad(outputs, list(wanted.values()), grads, retain_graph=True) for _ in range(100)]
    first = dict(zip(wanted, runs[0]))
    for again in runs[1:]:
        assert_same(dict(zip(wanted, again)), first, False)


@pytest.mark.parametrize("name", ["causal", "causal-256", "generic"])
def test_new_lengths_compile_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty launches of other lengths; in another order the sequences have the same gradients."""
    training = TRAININGS[name]
    training.run()
    for module in (launch, backward_launch):
        monkeypatch.setattr(module, "ensure_compiled", lambda *_: pytest.fail("compiles"))
    draw = random.Random(0)
    for seed in range(30):
        count = draw.choice([1, 2, 3, 17, 64])
        lengths = [int(draw.lognormvariate(4, 1.5)) % 1400 for _ in range(count)]
        same = (*lengths,)
        packing = training.packing._replace(lengths_q=same, lengths_k=same, longest=1500, behind=seed % 3)
        one = Training(packing)
        arguments, (do, _) = one.arguments(seed), one.outputs_gradients(seed)
        expected = train(arguments, do, None)
        order = draw.sample(range(count), count)
        starts = [0, *itertools.accumulate(lengths)]
        place = [row for i in order for row in range(starts[i], starts[i + 1])]
        bounds = cu_seqlens([lengths[i] for i in order])

        def mixed(x: Tensor, place: list[int] = place) -> Tensor:
            return torch.cat([x[place], x[len(place) :]]).detach()

        shuffled = {name: mixed(arguments[name]).requires_grad_() for name in "qkv"}
        got = train(arguments | shuffled | {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}, mixed(do), None)
        for leaf in "qkv":
            assert_same({leaf: got[leaf][: len(place)]}, {leaf: expected[leaf][place]}, False)


def test_a_graph_replays_with_other_lengths() -> None:
    arguments, (do, dlse) = GRAPHED.arguments(), GRAPHED.outputs_gradients()
    train(arguments, do, dlse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = train(arguments, do, dlse)
    for seed in range(1, 4):
        lengths = random.Random(seed).sample(LONG_TAIL, len(LONG_TAIL))
        fresh = GRAPHED.arguments(seed)
        with torch.no_grad():
            for name in "qkv":
                arguments[name].copy_(fresh[name])
            for name in ("cu_seqlens_q", "cu_seqlens_k"):
                arguments[name].copy_(cu_seqlens(lengths))
        graph.replay()
        graph.replay()
        assert_same(got, train(arguments, do, dlse), False)


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_two_streams_at_the_same_time(deterministic: bool) -> None:
    """Autograd runs a backward pass on the stream of its forward pass."""
    both = [(QUEUED.arguments(seed), *QUEUED.outputs_gradients(seed)) for seed in (0, 1)]
    expected = [train(*given, deterministic=deterministic) for given in both]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    runs: list[list[Grads]] = [[], []]
    for _ in range(20):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                runs[index].append(train(*both[index], deterministic=deterministic))
    torch.cuda.synchronize()
    for index in range(2):
        for again in runs[index]:
            assert_same(again, expected[index], deterministic)


@pytest.mark.parametrize("name", ["causal", "full", "alibi", "own-bias"])
def test_nothing_waits_for_the_device(name: str) -> None:
    training = TRAININGS[name]
    arguments, outputs = training.arguments(), training.outputs_gradients()
    train(arguments, *outputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            train(arguments, *outputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- Wrong lengths ---


@pytest.mark.parametrize("training", ["causal", "generic"])
@pytest.mark.parametrize("which", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize("name", WRONG)
def test_rows_of_wrong_lengths_are_unused(name: str, which: str, training: str, guarded: Guarded) -> None:
    """Nothing is touched but what is the call's, and all gradients are 0."""
    change, says = WRONG[name]
    arguments, outputs = TRAININGS[training].arguments(), TRAININGS[training].outputs_gradients()
    got = train(arguments | {which: change(arguments[which])}, *outputs)
    with pytest.raises(ValueError, match=f"{which} .*{says}"):
        tileattn.check_packed()
    guarded.assert_untouched()
    assert all((got[leaf] == 0).all() for leaf in "qkv")
    tileattn.check_packed()
