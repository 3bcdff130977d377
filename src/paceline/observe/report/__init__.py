"""``report.json`` and ``report.html``."""
