"""The weights of a model: their files, how they are loaded, and converted copies of them."""
