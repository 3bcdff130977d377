"""The kinds of samples that are tokenized. Each is one file, with its columns, the conversion of a
row and the encoding; a line in `registry.py` names it."""
