"""tileattn as an attention implementation of Hugging Face transformers.

`register` makes ``attn_implementation="tileattn"`` available::

    import tileattn.compat.transformers
    from transformers import AutoModelForCausalLM

    tileattn.compat.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="tileattn")

docs/transformers.md lists the supported models and masks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ...api.attention import check_backend
from ...installation import pip_install

if TYPE_CHECKING:
    from .context_parallel import ContextParallel

NAME = "tileattn"
OLDEST = (5, 17)

__all__ = ["register"]


def register(
    *, backend: str | None = None, ignore: Iterable[str] = (), context_parallel: ContextParallel | None = None
) -> None:
    """Registers ``attn_implementation="tileattn"`` with transformers, for all models.

    It registers an attention function and a function that makes its masks; without the second, transformers would pass
    no mask. It also registers ``"paged|tileattn"``, which is for continuous batching (``model.generate_batch``). A
    later call replaces the arguments of an earlier one.

    Args:
        backend: as for :func:`tileattn.attention`; None takes the first backend that accepts the call.
        ignore: names of keyword arguments that your model or training loop passes to the attention although they do
            not concern it. Other keyword arguments that tileattn does not know raise an error.
        context_parallel: a plan, such as ``tileattn.parallel.Plan``, for models whose inputs are shards of the
            sequence: each layer's q, k and v, its mask or window, cap and sink go to ``plan.attention``. Padding,
            packed sequences, dropout and caches are refused then.

    Raises:
        ImportError: transformers is not installed, or is older than 5.17.
        TypeError: ignore is not an iterable of names (a single name is not one), or context_parallel has no method
            `attention`.
        ValueError: no backend has that name, or its options are wrong.
    """
    check_backend(backend)
    ignored = _names(ignore)
    if context_parallel is not None and not callable(getattr(context_parallel, "attention", None)):
        raise TypeError(
            f"context_parallel must have a method attention(q, k, v, mask=, score_mod=, sink=, scale=), as a "
            f"tileattn.parallel.Plan has, got {type(context_parallel).__name__}"
        )
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"tileattn.compat.transformers needs transformers: {pip_install('transformers')}") from error
    if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST:
        raise ImportError(
            f"tileattn.compat.transformers needs transformers {'.'.join(map(str, OLDEST))} or newer, got "
            f"{transformers.__version__}: {pip_install('transformers')}"
        )
    from .attention import attend
    from .mask import make_mask
    from .paged import attend_paged

    options: dict[str, Any] = {"backend": backend, "ignored": ignored, "context_parallel": context_parallel}
    transformers.AttentionInterface.register(NAME, functools.partial(attend, **options))
    of_shard = functools.partial(make_mask, of_shard=True)
    transformers.AttentionMaskInterface.register(NAME, make_mask if context_parallel is None else of_shard)
    # Continuous batching asks for this name, and makes no mask for it.
    paged = functools.partial(attend_paged, backend=backend, ignored=ignored)
    transformers.AttentionInterface.register(f"paged|{NAME}", paged)


def _names(ignore: Any) -> frozenset[str]:
    names = None if isinstance(ignore, str) or not isinstance(ignore, Iterable) else frozenset(ignore)
    if names is None or not all(isinstance(name, str) for name in names):
        raise TypeError(f'ignore must be names in a list or another iterable, as in ["its_name"], got {ignore!r}')
    return names
