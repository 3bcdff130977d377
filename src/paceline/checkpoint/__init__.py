"""Checkpoints: format, reading, writing, verification and storage."""
