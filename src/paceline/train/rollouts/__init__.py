"""The stage of the trainer that generates completions and computes their advantages."""
