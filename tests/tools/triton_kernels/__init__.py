"""What the tests of Triton's kernels share: the compiler in a process of its own, and decode calls."""
