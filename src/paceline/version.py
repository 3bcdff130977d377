"""The version of Paceline."""

__version__ = "0.1.0"
