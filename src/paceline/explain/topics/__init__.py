"""One module per topic of ``paceline explain``."""
