"""Parallelism strategies of other tools: the keys of DeepSpeed, FSDP and Accelerate."""
