"""Parallelism strategies. :mod:`paceline.parallel.registry` lists them."""
