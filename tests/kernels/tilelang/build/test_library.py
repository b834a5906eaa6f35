"""Compiled kernels leave the current device as it is, whatever device their tensors are on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tileattn
from tileattn.kernels.tilelang.build import library


@pytest.mark.parametrize("fails", [False, True])
def test_a_launch_keeps_the_current_device(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher that TileLang generates sets it to that of the tensors."""
    current = [0]

    def kernel(device: int) -> None:
        current[0] = device
        if fails:
            raise ValueError("wrong arguments")

    modules: dict[str, dict[str, Callable[[int], None]]] = {"library.so": {"kernel": kernel}}
    monkeypatch.setattr(library, "runtime", lambda: SimpleNamespace(load_module=modules.__getitem__))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.__setitem__(0, device))
    launch = library.load(Path("library.so"))["kernel"]
    if fails:
        with pytest.raises(ValueError, match="wrong arguments"):
            launch(1)
    else:
        launch(1)
    assert current == [0]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_calls_on_another_device() -> None:
    q = torch.randn(2, 1, 8, 64, device="cuda:1", dtype=torch.bfloat16)
    cache = torch.randn(2, 600, 2, 64, device="cuda:1", dtype=torch.bfloat16)
    lengths = torch.tensor([600, 70], dtype=torch.int32, device="cuda:1")
    with torch.cuda.device(0):
        o = tileattn.decode(q, cache, cache, lengths, backend="tilelang")
        assert torch.cuda.current_device() == 0
        whole = tileattn.attention(q[:1], cache[:1], cache[:1], backend="tilelang")
        assert torch.cuda.current_device() == 0
        tileattn.check_caches()
    assert isinstance(o, torch.Tensor)
    torch.testing.assert_close(o[:1], whole, atol=2e-2, rtol=2e-2)
