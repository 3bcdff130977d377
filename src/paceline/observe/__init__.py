"""Metrics, console output, TensorBoard and reports: everything that a user sees of a run."""
