"""Compile the libraries of simulated CUDA once for all workers of pytest-xdist and for all
sessions, in pytest's cache folder."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from not_run import skip_with_summary

from paceline.core.files import cache_dir


def compile_shared(config: pytest.Config, compile_sources: Callable[[], object]) -> None:
    """Call ``compile_sources`` with the shared cache. Skips the test if CUDA cannot be simulated
    here, but never in CI."""
    from paceline.simulation.native import SimulationError

    assert config.cache is not None
    shared = config.cache.mkdir("simulation")
    link = cache_dir() / "simulation"
    with open(Path(shared) / "lock", "a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        if not link.exists():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(shared, target_is_directory=True)
        try:
            compile_sources()
        except SimulationError as error:
            if os.environ.get("CI"):
                raise
            skip_with_summary(config, "simulation", f"of simulated CUDA: {error.what}")


def build_libraries(*sources: Path) -> None:
    """Compile C++ sources of the simulation, if devices can be simulated with this torch."""
    from paceline.simulation.native import build_library, check_build, check_release

    check_build()
    check_release()
    for source in sources:
        build_library(source)
