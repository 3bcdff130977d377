"""Distributed basics: ranks, devices, process groups, collectives, traffic counters and seeds."""
