"""The version of flash-attn that this package replaces: a plain release number, since some users split it at dots."""

__version__ = "2.8.3"
