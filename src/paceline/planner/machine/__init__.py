"""What is known about this machine: the measurements of `paceline doctor`, and earlier runs."""
