"""PyTorch's ``context_parallel``, whose ring calls the flash operators that tileattn implements.

On a CPU, PyTorch's SDPA never chooses flash. There, two gloo processes run PyTorch's ring with tileattn's operators,
registered for CPU tensors, and a function in SDPA's place calls the operator that SDPA calls on a GPU. With two GPUs,
``pytest -m gpu`` runs all of it, with SDPA itself.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tileattn
from tests.tools.ranks.processes import on_ranks, once
from tileattn.runtime import context_parallel as region
from tileattn.testing import (
    assert_accurate,
    assert_gradients_accurate,
    eager_attention,
    eager_gradients,
    oracle_attention,
    oracle_gradients,
)

F = torch.nn.functional
NAMES = ("dq", "dk", "dv")
ROTATIONS = ("allgather", "alltoall")


def inputs(device: str) -> list[Tensor]:
    """q, k, v and do (batch, heads, seqlen, head_dim)."""
    torch.manual_seed(0)
    dtype, dim = (torch.float32, 16) if device == "cpu" else (torch.bfloat16, 64)
    return [torch.randn(2, 4, 32, dim, device=device).to(dtype) for _ in range(4)]


# --- On the ranks ---


def results(rank: int, ranks: int) -> dict[str, Any]:
    """The ring's o, dq, dk, dv by the way that PyTorch rotates k and v, whole, and the errors in the region."""
    from tileattn.compat import torch_sdpa

    library = torch_sdpa.register_kernels("CPU")

    def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]

    F.scaled_dot_product_attention = scaled_dot_product_attention
    found = {"errors": errors(ranks)} | {name: ring("cpu", ranks, name) for name in ROTATIONS}
    del library
    return found


def results_on_gpus(rank: int, ranks: int) -> dict[str, Any]:
    from torch.nn.attention import activate_flash_attention_impl

    torch.cuda.set_device(rank)
    activate_flash_attention_impl("tileattn")
    return {name: ring("cuda", ranks, name) for name in ROTATIONS}


def ring(device: str, ranks: int, rotation: str) -> list[Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard, set_rotate_method

    set_rotate_method(rotation)
    mesh = init_device_mesh(device, (ranks,))
    q, k, v, do = inputs(device)
    with context_parallel(mesh, buffers=[q, k, v, do], buffer_seq_dims=[2] * 4):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = F.scaled_dot_product_attention(*leaves, is_causal=True)
        parts = [o.detach(), *torch.autograd.grad(o, leaves, do)]
        whole = context_parallel_unshard(mesh, parts, [2] * 4)
    return [x.cpu() for x in whole]


def errors(ranks: int) -> dict[str, str]:
    """What is said in the region where a mask, or all but the rank's shard, would be left out; and after it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    q, k, v, _ = inputs("cpu")
    said = {"before": str(region.is_active())}
    with context_parallel(init_device_mesh("cpu", (ranks,)), buffers=[q, k, v], buffer_seq_dims=[2] * 3):
        said["in"] = str(region.is_active())
        for name, options in (("causal", {"is_causal": True}), ("mask", {"attn_mask": torch.zeros(16, 16)})):
            try:
                tileattn.scaled_dot_product_attention(q, k, v, **options)  # type: ignore[arg-type]
            except NotImplementedError as error:
                said[name] = str(error)
    return said | {"after": str(region.is_active())}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return dict(once(tmp_path_factory, "context_parallel", lambda: on_ranks(results, 2, seconds=60))[0])


# --- The tests ---


def check(got: list[Tensor], device: str) -> None:
    q, k, v, do = (x.cpu().transpose(1, 2) for x in inputs(device))
    got = [x.transpose(1, 2) for x in got]
    arguments = (q, k, v, tileattn.Causal())
    assert_accurate("o", got[0], oracle_attention(*arguments, (), None, None)[0], eager_attention(*arguments)[0])
    exact, same = ([x.to(dtype).requires_grad_() for x in (q, k, v)] for dtype in (torch.float64, q.dtype))
    oracle, sizes = oracle_gradients(dict(zip(NAMES, exact)), do.double(), None, *exact, tileattn.Causal())
    runs = eager_gradients(dict(zip(NAMES, same)), do, None, *same, tileattn.Causal())
    assert_gradients_accurate("the ring", dict(zip(NAMES, got[1:])), oracle, runs, sizes, q.dtype)


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_pytorchs_ring_on_tileattns_operators(rotation: str, found: dict[str, Any]) -> None:
    check(found[rotation], "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_pytorchs_ring_on_two_gpus() -> None:
    for got in on_ranks(results_on_gpus, 2, seconds=240, backend="cpu:gloo,cuda:nccl")[0].values():
        check(got, "cuda")


@pytest.mark.parametrize("name", ["causal", "mask"])
def test_a_call_that_would_see_one_shard_is_refused(name: str, found: dict[str, Any]) -> None:
    """PyTorch's own function takes a causal call to the ring, and refuses a mask; tileattn's would do neither."""
    assert found["errors"][name].startswith(
        "tileattn.scaled_dot_product_attention in PyTorch's context_parallel would see this rank's shard"
    )


def test_the_region_is_known_from_beginning_to_end(found: dict[str, Any]) -> None:
    assert [found["errors"][when] for when in ("before", "in", "after")] == ["False", "True", "False"]
