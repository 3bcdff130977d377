"""Tensor parallelism and sequence parallelism on plain tensors."""
