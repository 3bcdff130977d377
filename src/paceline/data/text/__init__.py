"""Text datasets: formats, chat templates, tokenizers and what is stored of a sample."""
