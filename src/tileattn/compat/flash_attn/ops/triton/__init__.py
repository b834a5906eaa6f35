"""``flash_attn.ops.triton``, of which tileattn provides only :mod:`rotary`."""
