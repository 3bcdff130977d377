"""Simulate CUDA devices in every Python process that starts with this folder in PYTHONPATH."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from simulated import simulate_values

simulate_values()
