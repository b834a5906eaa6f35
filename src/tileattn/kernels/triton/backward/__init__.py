"""The backward pass: its kernels, and the gradients of tensors that score modifications read."""
