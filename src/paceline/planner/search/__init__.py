"""The search for the fastest, smallest or cheapest set-up of a run: mode and axes, micro-batch,
recomputation, offloading, and what else the config leaves open. Imports no torch.
"""
