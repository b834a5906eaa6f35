"""The forward kernel for AMD's matrix cores."""
