"""Describe a model for cost estimates: shapes, FLOPs and activation memory."""
