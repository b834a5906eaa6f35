"""The suite parallel: attention over several GPUs beside the ideal, half the heads on each and no communication."""
