"""The output head of a language model and the loss that is computed in it."""
