"""Checks that run a model before training, and their stored results."""
