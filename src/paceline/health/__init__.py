"""Detection of hangs, stragglers, anomalies, loss spikes and diverging replicas. This package only
detects; the trainer reacts."""
