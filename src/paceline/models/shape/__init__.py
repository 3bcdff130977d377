"""A model as numbers: shape, FLOPs, activations."""
