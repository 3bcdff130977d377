"""Checks of this machine, and of the network between its ranks, before a run depends on them."""
