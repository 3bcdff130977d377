"""The proof that an exported model answers as the trained model."""
