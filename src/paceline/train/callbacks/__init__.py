"""Callbacks, which the trainer calls at fixed points of the training loop."""
