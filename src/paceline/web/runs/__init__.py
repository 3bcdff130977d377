"""Run discovery, the index of event logs, summaries, notes, and the event stream."""
