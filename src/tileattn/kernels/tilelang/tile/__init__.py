"""What the kernels of all phases do on a tile: softmax, masks, score modifications, dropout."""
