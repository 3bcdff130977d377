"""Algorithms recorded on real ranks, as text, as JSON and as a page."""
