"""Which flash-attn this stands in for. A plain release number: consumers compare it, and some split it at the dots."""

__version__ = "2.8.3"
