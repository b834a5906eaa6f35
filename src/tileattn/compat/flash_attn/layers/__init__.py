"""``flash_attn.layers``, of which tileattn provides only :mod:`rotary`."""
