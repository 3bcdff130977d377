"""Warnings about settings that have no effect."""

import pytest

from paceline.config.schema import Config
from paceline.distributed.mesh import ParallelDims
from paceline.launch.preflight import _warn_about_offload
from paceline.parallel.registry import ParallelLayout


@pytest.mark.parametrize(("mode", "warns"), [("ddp", True), ("single", True), ("zero3", False)])
def test_offload_without_effect_is_reported(
    mode: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config.model_validate(
        {"model": "m", "dataset": "d", "parallel": {"mode": mode, "cpu_offload": "all"}}
    )
    _warn_about_offload(config, ParallelLayout(mode, ParallelDims(data=2), 2))
    assert ("has no effect" in caplog.text) == warns
