"""Answers that the model generates during training, and metrics of them."""
