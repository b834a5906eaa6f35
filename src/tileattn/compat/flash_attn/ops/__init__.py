"""``flash_attn.ops``, of which tileattn provides only :mod:`triton.rotary`."""
