"""Ways to sum the gradients of replicas."""
