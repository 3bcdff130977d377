"""Gradient compressors: what is sent of a bucket of gradients, and what waits for a later step."""
