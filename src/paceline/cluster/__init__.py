"""Runs on several hosts: rendezvous, rank assignment, failure detection and job schedulers."""
