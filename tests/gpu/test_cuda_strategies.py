"""The strategies on CUDA devices: each alone on one device, and, where there are two or more, over
two with NCCL."""

import json
from pathlib import Path

import pytest
import torch
from commands import losses, report, run
from test_cuda import WORDS, cuda, on_cpu, train, visible

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
__all__ = ["cuda", "on_cpu"]  # fixtures

MODES = ["dp", "ddp", "zero1", "zero2", "zero3", "deepspeed", "tensor", "pipeline"]


@pytest.mark.parametrize("mode", MODES)
def test_alone_on_one_device(mode: str, on_cpu: dict[str, list[float]], tmp_path: Path) -> None:
    train(tmp_path / "run", 1, f"parallel.mode={mode}", env=visible(0))
    assert losses(tmp_path / "run") == pytest.approx(on_cpu["full"], rel=1e-3)
    assert report(tmp_path / "run")["strategy"] == mode
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_a_save_in_the_background_is_of_its_own_step(tmp_path: Path) -> None:
    """Training changes the weights while the copy is written."""
    words = ("max_steps=12", "save_steps=1", "save_total_limit=null", "--allow-config-change")
    train(tmp_path / "behind", 1, *words, env=visible(0))
    train(tmp_path / "waiting", 1, *words, "async_save=false", env=visible(0))
    for step in (1, 6, 11):
        name = f"checkpoints/step-{step:08d}"
        found = [
            json.loads(run(str(tmp_path / one / name), "--json", verb="inspect").stdout)
            for one in ("behind", "waiting")
        ]
        assert found[0]["digest"] == found[1]["digest"]


def test_weights_that_stay_in_the_hosts_memory(
    on_cpu: dict[str, list[float]], tmp_path: Path
) -> None:
    train(tmp_path / "run", 1, "parallel.mode=zero3", "parallel.cpu_offload=all", env=visible(0))
    assert losses(tmp_path / "run") == pytest.approx(on_cpu["full"], rel=1e-3)


if torch.cuda.device_count() >= 2:

    def test_the_certificate_on_two_devices(tmp_path: Path) -> None:
        done = run(
            *WORDS,
            "per_device_train_batch_size=4",
            "--world-size",
            "2",
            "--steps",
            "6",
            "--json",
            verb="verify",
        )
        found = {one["mode"]: one for one in json.loads(done.stdout)["modes"]}
        assert {name for name, one in found.items() if one["ok"]} >= {
            "ddp",
            "zero1",
            "zero2",
            "zero3",
            "tensor",
            "pipeline",
        }
