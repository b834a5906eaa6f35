"""What the layers of a step share: one encoding, one preparation and one plan, whatever the number of layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers", reason="needs transformers: pip install 'tileattn[transformers]'")

from tileattn import KeyPadding
from tileattn.call import cache_status
from tileattn.compat.transformers.attention import attend
from tileattn.compat.transformers.mask import MaskParts, make_mask
from tileattn.kernels.tilelang.decode import launch
from tileattn.runtime import decoding, prepared, shared_calls
from tileattn.runtime import operators as ops
from tileattn.variant import key as variant_key

KEYS, SLOTS, HEADS, KV_HEADS, DIM = 600, 640, 4, 2, 64
CACHES = ("dynamic", "static")
# Of a later layer's launch: views of q, k and v, and o. Nothing waits for a GPU (aten._local_scalar_dense,
# aten.is_nonzero), and nothing is filled, copied or converted.
OPERATIONS = ["aten.transpose.int"] * 3 + ["aten.new_empty.default"]


class Layer(torch.nn.Module):
    is_causal = True


def mask_of(cache: str, keys: int = KEYS) -> MaskParts:
    """The mask of one token after others. A padding mask is kept on a GPU; here it must hide something to be kept."""
    kept = torch.ones(1, keys, dtype=torch.bool)
    kept[0, 0] = False
    slots, offset = (keys, keys - 1) if cache == "dynamic" else (SLOTS, torch.tensor(keys - 1))
    return make_mask(1, 1, slots, offset, 0, attention_mask=kept)


def tensors(cache: str, keys: int = KEYS, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    slots = keys if cache == "dynamic" else SLOTS
    return [torch.randn(1, heads, n, DIM).to(dtype) for heads, n in ((HEADS, 1), (KV_HEADS, slots), (KV_HEADS, slots))]


class Operations(TorchDispatchMode):
    """The operations of torch that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches() -> Iterator[dict[str, mock.Mock]]:
    """TileLang's launches on CPU tensors, with kernels that do nothing."""
    kernels = {"decode": mock.Mock(), "plan": mock.Mock()}
    with ExitStack() as patches:
        # A table of its own: a later test's call on a CPU must not find one that was prepared for a GPU.
        patches.enter_context(mock.patch.object(prepared, "FORWARDS", {}))
        for module in (ops, decoding):
            patches.enter_context(mock.patch.object(module, "_asks_for_alignment", return_value=True))
            patches.enter_context(mock.patch.object(module, "device_arch", return_value="sm_90a"))
        for name, value in (("decode_function", kernels["decode"]), ("plan_function", kernels["plan"])):
            patches.enter_context(mock.patch.object(launch, name, return_value=value))
        patches.enter_context(mock.patch.object(launch, "multiprocessors", return_value=132))
        patches.enter_context(mock.patch.object(torch.cuda, "current_device", return_value=0))
        patches.enter_context(mock.patch.object(cache_status, "report"))
        yield kernels


@torch.no_grad()
@pytest.mark.parametrize("cache", CACHES)
def test_a_step_prepares_and_plans_once(cache: str, launches: dict[str, mock.Mock]) -> None:
    mask, layers = mask_of(cache), [tensors(cache) for _ in range(6)]
    with mock.patch.object(variant_key, "_encode", side_effect=variant_key._encode) as encoded:
        for number, layer in enumerate(layers):
            if number == 2:
                encoded.reset_mock()
            attend(Layer(), *layer, mask, scaling=0.125)
    assert launches["decode"].call_count == len(layers)
    assert launches["plan"].call_count == 2, "of the first, ordinary call, and of all others"
    assert not encoded.called, "the mask was encoded again"


@torch.no_grad()
@pytest.mark.parametrize("cache", CACHES)
def test_a_layer_runs_few_operations(cache: str, launches: dict[str, mock.Mock]) -> None:
    mask, operations = mask_of(cache), Operations()
    for _ in range(3):
        attend(Layer(), *tensors(cache), mask)
    layer = tensors(cache)
    lengths = torch.full((1,), KEYS, dtype=torch.int32)
    with (
        mock.patch.object(ops, "is_traced", return_value=False),  # the mode that counts is no tracer
        mock.patch("tileattn.runtime.few_queries.FewQueries._lengths", return_value=lengths),  # kept on a GPU
        operations,
    ):
        attend(Layer(), *layer, mask)
    assert operations.names == OPERATIONS


def test_the_padding_of_a_step_takes_few_operations() -> None:
    keep = torch.ones(1, KEYS, dtype=torch.bool)
    with Operations() as operations:
        KeyPadding(keep)
    assert len(operations.names) <= 16, operations.names
    assert not {"aten._local_scalar_dense.default", "aten.is_nonzero.default"} & set(operations.names)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("cache", CACHES)
def test_later_layers_compute_what_the_first_would(cache: str, dtype: torch.dtype) -> None:
    mask, sink = mask_of(cache), torch.randn(HEADS)
    for softcap in (None, 20.0):
        options: dict[str, Any] = {"scaling": 0.2, "softcap": softcap, "s_aux": sink}
        for _ in range(3):
            layer = tensors(cache, dtype=dtype)
            o, _ = attend(Layer(), *layer, mask, **options)
            expected, _ = attend(Layer(), *layer, mask_of(cache), **options)  # with a mask of its own: a first layer
            assert torch.equal(o, expected)
    assert len(mask.calls) == 2, "one call for each kind of layer"


def test_which_calls_are_not_shared() -> None:
    layer, mask = tensors("dynamic", dtype=torch.float32), mask_of("dynamic")
    attend(Layer(), *(x.requires_grad_() for x in layer), mask)
    attend(Layer(), *(x.detach() for x in layer), mask, dropout=0.5)
    attend(Layer(), *(x.detach() for x in layer), mask, position_bias=torch.zeros(1, HEADS, 1, KEYS))
    with torch.autocast("cpu", torch.bfloat16):
        attend(Layer(), *(x.detach() for x in layer), mask)
    assert not mask.calls


@torch.no_grad()
def test_wrong_arguments_are_found_in_every_layer() -> None:
    layer, mask = tensors("dynamic", dtype=torch.float32), mask_of("dynamic")
    for _ in range(3):
        with pytest.raises(ValueError, match="is_causal=False contradicts"):
            attend(Layer(), *tensors("static", dtype=torch.float32), mask_of("static"), is_causal=False)
        with pytest.raises(ValueError, match="made for 1 queries and 600 keys"):
            attend(Layer(), *(x[:, :, :500] for x in layer), mask)
        attend(Layer(), *layer, mask)


def test_a_plan_belongs_to_a_stream() -> None:
    phase, make_plan = mock.Mock(return_value=(torch.zeros(1), None)), mock.Mock(side_effect=lambda _: torch.zeros(1))
    call = shared_calls.SharedCall(lambda *tensors: tensors, phase, make_plan)
    q = mock.Mock(is_cuda=True)
    for stream, capturing in ((1, False), (1, False), (2, False), (2, True), (2, False)):
        with (
            mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=capturing),
            mock.patch.object(torch._C, "_cuda_getCurrentRawStream", return_value=stream, create=True),
        ):
            call(q, q, q, None)
        assert (phase.call_args.args[1] is None) == capturing, "a CUDA graph must hold its plans"
    assert make_plan.call_count == 2


def test_a_launch_for_all_layers_belongs_to_a_stream_and_to_no_graph() -> None:
    phase, make_plan = mock.Mock(return_value=(torch.zeros(1), None)), mock.Mock(side_effect=lambda _: torch.zeros(1))
    launches = [mock.Mock(return_value=torch.full((1,), float(n))) for n in (1, 2)]
    call = shared_calls.SharedCall(lambda *tensors: tensors, phase, make_plan, mock.Mock(side_effect=launches))
    q, got = mock.Mock(is_cuda=True), []
    for stream, capturing in ((1, False), (1, False), (2, True), (2, False)):
        with (
            mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=capturing),
            mock.patch.object(torch._C, "_cuda_getCurrentRawStream", return_value=stream, create=True),
        ):
            got.append(int(call(q, q, q, None)))
    assert got == [1, 1, 0, 2]
    phase.assert_called_once()


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("cache", CACHES)
def test_nothing_waits_for_a_gpu(cache: str) -> None:
    """A step with a padding mask of ones, as `generate` passes it."""
    kept = torch.ones(1, KEYS, dtype=torch.bool, device="cuda")
    slots, offset = (KEYS, KEYS - 1) if cache == "dynamic" else (SLOTS, torch.tensor(KEYS - 1, device="cuda"))
    layers = [[x.cuda() for x in tensors(cache)] for _ in range(4)]

    def mask() -> MaskParts:
        return make_mask(1, 1, slots, offset, 0, attention_mask=kept, device="cuda")

    expected = [attend(Layer(), *layer, mask())[0] for layer in layers]  # each is the first layer of a mask
    for _ in range(2):  # the first time prepares and loads kernels
        shared = mask()
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = [attend(Layer(), *layer, shared)[0] for layer in layers]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(o, of_first) for o, of_first in zip(got, expected, strict=True))
