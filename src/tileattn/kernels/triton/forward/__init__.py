"""The forward pass: its kernel and the launch."""
