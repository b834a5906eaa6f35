"""What loads a kernel is itself loaded once, whichever threads ask for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tileattn.kernels.bundles import runtime


@pytest.fixture(autouse=True)
def nothing_is_loaded() -> Iterator[None]:
    runtime._loaded.cache_clear()
    yield
    runtime._loaded.cache_clear()


def test_threads_load_and_register_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second registration of the function that makes tensor maps fails."""
    pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi")
    registered: list[int] = []

    def register(*addresses: Any) -> int:
        time.sleep(0.02)  # so that all threads would be here
        registered.append(1)
        return len(registered) - 1

    bundle = SimpleNamespace(folder=Path("bundle"), manifest=SimpleNamespace(runtime={runtime.TENSOR_MAPS: ""}))
    monkeypatch.setattr(runtime, "tilelang_libraries", lambda: None)
    monkeypatch.setattr(runtime.installed, "runtime", lambda: bundle)
    monkeypatch.setattr(runtime, "_load", lambda path: SimpleNamespace(tileattn_register_tensor_maps=register))
    found: list[Any] = []
    together = threading.Barrier(4)

    def ask() -> None:
        together.wait()
        found.append(runtime.runtime())

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(registered) == 1
    assert len(found) == 4


def test_without_either_it_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi")
    monkeypatch.setattr(runtime, "tilelang_libraries", lambda: None)
    monkeypatch.setattr(runtime.installed, "runtime", lambda: None)
    with pytest.raises(ModuleNotFoundError, match="neither TileLang nor a bundle of kernels has one"):
        runtime.runtime()
