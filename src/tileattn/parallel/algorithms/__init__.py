"""Attention of one rank: gathered keys (also Ulysses and two levels), the ring, and autograd around them."""
