"""The OpenAI-compatible server, `paceline serve`."""
