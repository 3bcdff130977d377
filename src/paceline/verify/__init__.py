"""``paceline verify``: train a few steps under every mode and compare."""
