"""Chats with images: rows, tokens, and the images of a batch."""
