"""The time of a training step, from a physical model with constants fitted to published results.

:mod:`~paceline.planner.time.work` counts what a rank does, :mod:`~paceline.planner.time.step` turns
it into seconds. Imports no torch.
"""
