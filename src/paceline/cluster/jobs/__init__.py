"""Job files for schedulers: batch scripts for Slurm, manifests for Kubernetes."""
