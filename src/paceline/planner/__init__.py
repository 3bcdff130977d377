"""Estimates before a run: memory, traffic and time of every mode, and the choice of ``mode: auto``.

Importing the package imports no torch.
"""
