"""Paceline's own all-reduce and broadcast algorithms over point-to-point messages."""
