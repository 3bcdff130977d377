"""Rows that are read and tokenized while training runs, instead of before it."""
