"""Start a run: the plan, the rank processes of this host, and restarts after faults."""
