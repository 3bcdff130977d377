"""Generation, chat and export with a trained model."""
