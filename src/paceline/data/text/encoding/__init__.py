"""Tokenize rows: one at a time, or in chunks on several processes."""
