"""Files of LLaMA-Factory: the list of its datasets, and the form of its configs from version 1."""
