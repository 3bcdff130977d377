"""The memory of any set-up, also of those that Paceline does not train.

For Paceline's own strategies, :mod:`paceline.planner.estimate` is more exact. Imports no torch.
"""
