"""Runs over several hosts: rendezvous, numbering of ranks, failures, and the schedulers that start
them."""
