"""Models: Hugging Face language models, adapters, the built-in ones."""
