"""Statistics of a dataset in tokens."""
