"""What generates the completions of a run: one interface, and an implementation for each engine."""
