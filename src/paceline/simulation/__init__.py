"""CUDA devices simulated on the CPU build of torch, for planning and for tests."""
