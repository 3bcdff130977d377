"""Changes to how a model's blocks run: activation checkpointing and compilation."""
