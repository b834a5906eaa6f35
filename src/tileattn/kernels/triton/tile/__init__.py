"""What both passes do on a tile: loads and products, loops, score modifications as Triton functions."""
