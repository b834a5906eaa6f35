"""Loads and launches the ladder's kernels, by cuda-core."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from ..cache.store import kernel_cache
from .compile import build_cubin, cache_key
from .rungs import Kernel


def ensure_compiled(kernel: Kernel, arch: str) -> Path:
    """The path of a kernel's cubin, which is compiled first if the cache lacks it (one or two seconds)."""

    def build(path: Path) -> None:
        build_cubin(kernel, arch, path)

    return kernel_cache(".cubin").find_or_build(cache_key(kernel, arch), build)


class Launcher:
    """A kernel loaded onto one device; a call launches it.

    Args:
        kernel: the kernel to load.
        arch: of the device, such as "sm_90a".
        index: of the device.
    """

    def __init__(self, kernel: Kernel, arch: str, index: int) -> None:
        from cuda.bindings import driver
        from cuda.core import Device, LaunchConfig, ObjectCode, Stream, launch

        self._launch, self._config, self._stream = launch, LaunchConfig, Stream.from_handle
        self._threads, self._shared = kernel.tiles.threads, kernel.shared_memory()
        self._device = Device(index)
        with torch.cuda.device(index):
            self._device.set_current()
            self._code = ObjectCode.from_cubin(str(ensure_compiled(kernel, arch)))
            self._kernel = self._code.get_kernel("attention")
            # A block may use more than 48 KiB of shared memory only after this call.
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (error,) = driver.cuKernelSetAttribute(attribute, self._shared, self._kernel.handle, driver.CUdevice(index))
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(
                f"{kernel} needs {self._shared} bytes of shared memory, and the driver says {error.name}"
            )

    def __call__(self, blocks: int, *arguments: int | float) -> None:
        """Launches on the current stream. Integers and addresses are passed as 64 bits, floats as double."""
        config = self._config(grid=blocks, block=self._threads, shmem_size=self._shared)
        with torch.cuda.device(self._device.device_id):
            self._device.set_current()  # a thread has no CUDA context before its first launch
            stream = self._stream(torch.cuda.current_stream().cuda_stream)
            self._launch(stream, config, self._kernel, *arguments)


@functools.cache
def launcher(kernel: Kernel, arch: str, index: int) -> Any:
    """The kernel on a device; it is compiled and loaded once per process."""
    return Launcher(kernel, arch, index)
