"""Tensor-parallel plans: which layers are split, and how."""
