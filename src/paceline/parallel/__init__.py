"""The core of parallelism: what a strategy is, and what several share."""
