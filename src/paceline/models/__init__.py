"""Models: loading, saving, adapters, and the built-in models."""
