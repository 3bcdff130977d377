"""Completions of prompts that a model generates while it is trained, their rewards and their
advantages."""
