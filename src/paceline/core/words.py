"""Words for people."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """``1, "sample"`` → ``1 sample``; ``2000, "sample"`` → ``2,000 samples``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
