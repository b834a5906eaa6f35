"""What TileLang generates of a kernel, as texts of which nvcc and the host's compiler make a library by themselves."""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

from . import nvcc

HOST_OPTIONS = ["-x", "c"]  # what TileLang generates for the host is C; g++ takes 0.1 s less than with C++


class Sources(NamedTuple):
    """What TileLang generates of a function.

    Attributes:
        device: in CUDA or HIP.
        host: in C.
        image: what TVM's loader reads in a library for NVIDIA's GPUs, with the word "ptx" where the cubin will be
            (:func:`image_with`); empty for AMD's.
    """

    device: str
    host: str
    image: bytes = b""

    @property
    def digest(self) -> str:
        """A digest of all that is compiled: it lasts as long as the kernel is generated the same way."""
        parts = [nvcc.prepared(self.device), self.host, " ".join(nvcc.OPTIONS), " ".join(HOST_OPTIONS)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def image_with(image: bytes, cubin: bytes) -> bytes:
    """The image of a library, with a kernel's machine code in the place of the word "ptx".

    An image, as TVM's runtime writes and reads it, is the number of its bytes, the tree of modules, the module's kind
    ("cuda"), the number of the bytes that follow, the code's format, the kernels' names and arguments, and the code.
    Numbers have 64 bits, and a text or code has its length before it.

    Raises:
        ValueError: it is no such image.
    """
    kind, placeholder = _text(b"cuda"), _text(b"ptx")
    tree, found, module = image[8:].partition(kind)
    functions = module[8 + len(placeholder) : -len(placeholder)]
    if image != _text(tree + found + _text(placeholder + functions + placeholder)):
        raise ValueError(
            "the installed TileLang lays out the image of a library otherwise than TileLang 0.1.15, for which this "
            "version of tileattn was made: pip install tilelang==0.1.15"
        )
    return _text(tree + kind + _text(_text(b"cubin") + functions + _text(cubin)))


def _text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content
