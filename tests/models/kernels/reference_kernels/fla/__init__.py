"""Stands for the package flash-linear-attention."""
