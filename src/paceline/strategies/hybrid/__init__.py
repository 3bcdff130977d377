"""Tensor parallelism, pipeline parallelism, and their combinations with data parallelism."""
