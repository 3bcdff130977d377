"""Layers of experts: which modules they are, and the tokens that each expert gets."""
