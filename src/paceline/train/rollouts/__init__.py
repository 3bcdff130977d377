"""The stage of the trainer that generates completions, scores them and computes their advantages."""
