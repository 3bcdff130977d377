"""Runs on many hosts: networks with several levels of switches, and failures. Imports no torch."""
