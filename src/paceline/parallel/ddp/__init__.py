"""Data parallelism with a full replica on each rank: ``single``, ``dp`` and ``ddp``."""
