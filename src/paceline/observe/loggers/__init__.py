"""Metric loggers (``report_to``): TensorBoard, and clients of experiment trackers."""
