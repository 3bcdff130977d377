"""The panel (``paceline ui``): a server that reads runs, and its page. It stands beside runs, never
in their way."""
