"""ZeRO stage 1: sharded optimizer state."""
