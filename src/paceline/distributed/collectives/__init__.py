"""Paceline's own all-reduce and broadcast over point-to-point calls."""
