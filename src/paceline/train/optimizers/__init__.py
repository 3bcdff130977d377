"""Optimizers that torch does not have, or not in the form that the strategies need."""
