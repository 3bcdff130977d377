"""The order of samples: which samples each micro-batch of each step has."""
