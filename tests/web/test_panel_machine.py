"""What the panel says of accelerators that are there."""

import pytest

from paceline.web.api.machine import machine


@pytest.mark.gpu
def test_an_nvidia_device_tells_of_itself() -> None:
    import torch

    found = machine()
    assert found["gpus_problem"] is None
    assert len(found["gpus"]) >= torch.cuda.device_count()
    for gpu in found["gpus"]:
        assert gpu["name"]
        assert 0 <= gpu["utilisation"] <= 1
        assert 0 < gpu["memory_used_bytes"] <= gpu["memory_bytes"]
        assert gpu["temperature_c"] > 0
        assert gpu["power_w"] > 0
