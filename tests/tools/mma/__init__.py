"""What the tests of the ladder share: cases, and the emulator of its kernels."""
