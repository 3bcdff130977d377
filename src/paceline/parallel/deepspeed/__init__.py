"""ZeRO by DeepSpeed."""
