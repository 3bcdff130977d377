"""Vision-language models: their types, and the parts that they are made of."""
