"""The report of a run: ``report.json`` and ``report.html``."""
