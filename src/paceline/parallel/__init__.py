"""Parallelism strategies, which are listed in :mod:`paceline.parallel.registry`."""
