"""ZeRO stage 1: optimizer state in shards."""
