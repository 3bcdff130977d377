"""The engine: the training loop, its state, checkpoints, evaluation, and what a person sees of a run."""
