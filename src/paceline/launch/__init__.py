"""Start a run: preflight checks, the rank processes of this host, and restarts after faults."""
