"""The conformance cases of packed sequences: they have the sizes that they name, and wrong results fail them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.tools.conformance_call import run
from tileattn.testing import (
    Arguments,
    ConformanceCase,
    assert_forward_accurate,
    assert_gradients_accurate,
    build,
    expected_forward,
    expected_gradients,
    gradients,
    output_gradients,
    packed_cases,
)
from tileattn.testing.shapes import PackedShape, Shape

CASES = packed_cases("quick")


def test_cases_have_distinct_ids_and_nested_selections() -> None:
    smoke, quick, full = ({case.id for case in packed_cases(name)} for name in ("smoke", "quick", "full"))
    assert smoke < quick < full
    assert set(Counter(case.id for case in packed_cases("full")).values()) == {1}
    with pytest.raises(ValueError, match="selection must be"):
        packed_cases("all")


def test_every_feature_is_in() -> None:
    shapes = [case.shape for case in packed_cases("smoke")]
    assert {shape.values for shape in shapes} == {"normal", "large", "negative"}
    assert {shape.layout for shape in shapes} >= {"bshd", "bhsd", "packed", "island", "unaligned"}
    pairs = [pair for shape in shapes for pair in zip(shape.lengths_q, shape.lengths_k)]
    assert any(q > k > 0 for q, k in pairs)
    assert any(k > q > 0 for q, k in pairs)
    assert any(q == 0 < k for q, k in pairs)
    assert any(k == 0 < q for q, k in pairs)
    assert any(shape.behind for shape in shapes)
    assert any(not shape.lengths_q for shape in shapes)
    assert any(shape.dropout_p for shape in shapes)


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.id)
def test_a_case_is_what_its_id_says(case: ConformanceCase) -> None:
    arguments, shape = build(case), case.shape
    assert isinstance(shape, PackedShape)
    assert arguments.packed is not None
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = arguments.packed
    assert tuple(cu_seqlens_q.diff().tolist()) == shape.lengths_q
    assert tuple(cu_seqlens_k.diff().tolist()) == shape.lengths_k
    assert max_seqlen_q == max(shape.lengths_q, default=0) + shape.slack[0]
    assert max_seqlen_k == max(shape.lengths_k, default=0) + shape.slack[1]
    do, _ = output_gradients(case, arguments)
    for x, used in (
        (arguments.q, cu_seqlens_q),
        (arguments.k, cu_seqlens_k),
        (arguments.v, cu_seqlens_k),
        (do, cu_seqlens_q),
    ):
        assert x.shape[:2] == (1, int(used[-1]) + shape.behind)
        assert x[:, : used[-1]].float().isfinite().all()
        assert x[:, used[-1] :].float().isnan().all()


def test_uniform_lengths_are_a_dense_call() -> None:
    """What is expected of packed sequences is what is expected of the same tensors as a batch."""
    structure = next(case.structure for case in CASES if case.structure.scores == ("bias_bh",))
    dense = build(ConformanceCase(structure, Shape(3, 4, 2, 40, 50)))
    shape = PackedShape("uniform", 4, 2, (40,) * 3, (50,) * 3)
    q, k, v = (x.flatten(0, 1)[None] for x in (dense.q, dense.k, dense.v))
    packed = replace(dense, q=q, k=k, v=v, packed=shape.packed(torch.device("cpu")))
    for (o, lse), (dense_o, dense_lse) in zip(expected(packed), expected(dense)):
        torch.testing.assert_close(o.unflatten(1, (3, 40))[0], dense_o)
        torch.testing.assert_close(lse[0].unflatten(1, (3, 40)).transpose(0, 1), dense_lse)


def expected(arguments: Arguments) -> list[tuple[Tensor, Tensor]]:
    """The results of the oracle and of eager's first run."""
    oracle, (eager_o, eager_lse) = expected_forward(arguments)
    return [oracle, (eager_o[0], eager_lse[0])]


CASE = next(case for case in CASES if case.structure.scores == ("alibi_b",))


def test_a_boundary_that_is_off_by_one_is_seen() -> None:
    """The error shows in o and lse, and in the gradients."""
    arguments = build(CASE)
    assert arguments.packed is not None
    moved = arguments.packed.cu_seqlens_k.clone()
    assert moved[1] > 1
    moved[1] -= 1
    wrong = replace(arguments, packed=arguments.packed._replace(cu_seqlens_k=moved, max_seqlen_k=1000))
    leaves = wrong.leaves()
    do, dlse = output_gradients(CASE, arguments)
    results = run(wrong, "torch")
    with pytest.raises(AssertionError, match="lse of"):
        assert_forward_accurate("moved", results, *expected_forward(arguments))
    with pytest.raises(AssertionError, match="dq of"):
        assert_gradients_accurate(
            "moved", gradients(results, leaves, do, dlse), *expected_gradients(arguments, do, dlse), CASE.dtype
        )


def test_what_is_written_behind_the_last_sequence_is_seen() -> None:
    case = next(case for case in CASES if case.shape.label == "skewed")  # type: ignore[union-attr]
    arguments = build(case)
    o, lse = run(arguments, "torch")
    o = o.detach().clone()
    o[0, -1, 0, 0] = 1e-3
    with pytest.raises(AssertionError, match="not 0 in rows without keys"):
        assert_forward_accurate("written", (o, lse), *expected_forward(arguments))
