"""The forward kernel for Hopper: a producer that loads tiles, consumers that multiply them."""
