"""Ranks, devices, the process group, collectives that count their bytes, seeds."""
