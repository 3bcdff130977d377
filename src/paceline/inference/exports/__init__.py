"""Exports of trained models, each with a proof that it answers as the trained model."""
