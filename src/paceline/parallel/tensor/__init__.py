"""Tensor parallelism on plain tensors."""
