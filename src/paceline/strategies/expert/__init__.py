"""Expert parallelism: ranks divide the experts of each layer, and send tokens to each other."""
