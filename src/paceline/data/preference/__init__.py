"""Answers with preferences: pairs, or single answers that are marked as good or bad."""
