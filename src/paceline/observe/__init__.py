"""Metrics, console output, TensorBoard, and what else a user sees of a run."""
