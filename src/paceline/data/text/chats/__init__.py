"""Turns of chats: their keys in rows, and their ends in rendered text."""
