"""Adapters: they run existing code on tileattn's kernels without changes to that code.

- :mod:`tileattn.compat.flash_attn`: the functions of the flash-attn package, with their names and arguments.
- :mod:`tileattn.compat.torch_sdpa`: PyTorch's own calls of ``scaled_dot_product_attention``.
- :mod:`tileattn.compat.flex_attention`: the interface of ``torch.nn.attention.flex_attention``.
- :mod:`tileattn.compat.transformers`: the models of Hugging Face transformers.
- :mod:`tileattn.compat.vllm` and :mod:`tileattn.compat.sglang`: attention backends of these serving engines.

``import tileattn`` imports none of them.
"""
