"""Training on a Ray cluster through Ray Train."""
