"""Gradients in buckets, and how strategies sum them over replicas."""
