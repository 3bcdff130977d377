"""Training: the loop, its state, optimizer, precision, evaluation, and the final model."""
