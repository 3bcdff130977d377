"""Sources of rows: files, folders, the Hugging Face hub, and built-in datasets."""
