"""Context parallelism: ranks divide the tokens of each row."""
