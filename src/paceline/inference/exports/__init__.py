"""Exports of trained models, each with a proof that the written model answers as the trained one."""
