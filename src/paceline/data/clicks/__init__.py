"""Click logs for ``task: recommend``."""
