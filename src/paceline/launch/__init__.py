"""Starting a run: the checks before it, the ranks on this host, and what becomes of them."""
