"""Errors, events and atomic files: what every other room stands on. Never imports torch."""
