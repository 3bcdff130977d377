"""Attention over rows whose tokens are divided among the ranks of a context group."""
