"""Train every combination of some overrides, or search for the best one: `paceline sweep`."""
