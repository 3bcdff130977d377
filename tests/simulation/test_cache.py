"""Test that the tests of simulated CUDA are skipped without a compiler, but not in CI."""

import pytest
from simulation_cache import compile_shared

from paceline.simulation.native import SimulationError


def fail_to_compile() -> None:
    raise SimulationError("no compiler was found")


def test_skipped_without_a_compiler(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no compiler was found"):
        compile_shared(pytestconfig, fail_to_compile)


def test_not_skipped_in_ci(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(SimulationError, match="no compiler was found"):
        compile_shared(pytestconfig, fail_to_compile)
