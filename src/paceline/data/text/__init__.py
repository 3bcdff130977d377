"""Text datasets: formats, chat templates, tokenization and the token cache."""
