"""Data: sources, formats, tokenization, packing, the order of samples, and the resumable loader."""
