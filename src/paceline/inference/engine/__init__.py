"""Engines, which generate answers: one interface for `generate`, `serve` and the chat."""
