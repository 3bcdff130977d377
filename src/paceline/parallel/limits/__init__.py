"""Declare the settings that are not supported. Imports no torch."""
