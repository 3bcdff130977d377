"""What `parallel.mode: auto` chooses."""
