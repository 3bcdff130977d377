"""Data parallelism with a full replica on each rank: ``single`` and ``ddp``."""
