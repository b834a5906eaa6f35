"""Doors through which existing code comes to tileattn's kernels without being changed.

- :mod:`tileattn.compat.flash_attn`: the functions of the flash-attn package, under their names.
- :mod:`tileattn.compat.torch_sdpa`: PyTorch's own calls of ``scaled_dot_product_attention``.
- :mod:`tileattn.compat.transformers`: the models of Hugging Face transformers.

All lie above :func:`tileattn.attention`, and nothing of the package imports them before they are used.
"""
