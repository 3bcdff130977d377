"""Errors, events, logging and atomic files, used by all other packages. Never imports torch."""
