"""Pipeline parallelism: divide a model into stages and run micro-batches through them."""
