"""Kernels that replace parts of a model."""
