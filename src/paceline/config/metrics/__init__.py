"""Names of the metrics of an evaluation."""
