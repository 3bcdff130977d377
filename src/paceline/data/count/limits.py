"""Limits of the memory of a count, without imports, because help texts show them."""

#: With less memory, a chunk of text and the table do not fit.
MIN_MEMORY_BYTES = 1 << 20
DEFAULT_MEMORY_BYTES = 256_000_000
