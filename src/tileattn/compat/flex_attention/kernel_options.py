"""``kernel_options`` of FlexAttention: hints for PyTorch's Triton kernels, which tileattn does not need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn.attention.flex_attention import FlexKernelOptions

# They change how fast PyTorch's kernels run, or how they round, not what they compute.
_HINTS = frozenset(FlexKernelOptions.__annotations__) - {"BACKEND"}


def check_kernel_options(options: Any) -> None:
    """Accepts the hints of :class:`FlexKernelOptions`, also with ``fwd_`` or ``bwd_`` before them. They have no effect.

    Raises:
        TypeError: options is not a mapping.
        ValueError: PyTorch documents no such option.
        NotImplementedError: BACKEND asks for one of PyTorch's kernels.
    """
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise TypeError(f"kernel_options must be a dict or None, got {type(options).__name__}")
    for name, value in options.items():
        if name == "BACKEND":
            if value != "AUTO":
                raise NotImplementedError(
                    f"kernel_options: BACKEND={value!r} names a kernel of PyTorch; leave it out, or take PyTorch's own "
                    f"flex_attention"
                )
        elif str(name).removeprefix("fwd_").removeprefix("bwd_") not in _HINTS:
            raise ValueError(
                f"kernel_options: no option is called {name!r}; known ones are {', '.join(sorted(_HINTS))}"
            )
