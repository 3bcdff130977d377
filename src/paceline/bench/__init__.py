"""``paceline bench``."""
