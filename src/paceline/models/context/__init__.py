"""Context parallelism: attention whose keys and values are on several ranks."""
