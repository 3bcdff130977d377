"""Tokenize the rows of all kinds of samples, in chunks on several processes, into the token
cache."""
