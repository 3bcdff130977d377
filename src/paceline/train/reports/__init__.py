"""What a run reports of itself: the event at its start, and ``report.json`` at its end."""
