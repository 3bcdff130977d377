"""Where rows come from: files, folders, the Hugging Face hub, built-in data."""
