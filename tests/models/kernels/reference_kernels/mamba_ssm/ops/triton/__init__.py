"""Stands for the package mamba-ssm."""
