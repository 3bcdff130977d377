"""Test the warnings about settings that have no effect."""

import pytest

from paceline.config.schema import Config
from paceline.distributed.mesh import ParallelDims
from paceline.launch.preflight import _warn_about_idle_settings
from paceline.parallel.registry import ParallelLayout


@pytest.mark.parametrize(("mode", "warns"), [("ddp", True), ("single", True), ("zero3", False)])
def test_warns_about_offload_without_effect(
    mode: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config.model_validate(
        {"model": "m", "dataset": "d", "parallel": {"mode": mode, "cpu_offload": "all"}}
    )
    _warn_about_idle_settings(config, ParallelLayout(mode, ParallelDims(data=2), 2), None)
    assert ("has no effect" in caplog.text) == warns
