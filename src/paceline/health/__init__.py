"""Detection of hangs, stragglers, anomalies, loss spikes and diverging replicas. Detection only:
the trainer acts."""
