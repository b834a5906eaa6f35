"""The backward pass on AMD's matrix cores."""
