"""Which layers tensor parallelism splits, and how."""
