"""Test predictions of device memory against measured peaks, and runs that exhaust the memory."""

import json
import os
from pathlib import Path

import pytest
import torch
from commands import losses, report, run
from test_cuda import cuda, visible

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
__all__ = ["cuda"]  # fixture

MODEL = (
    "model=builtin:qwen2-tiny", "dataset=builtin:python-docs#400", "max_length=512", "max_steps=6",
    "per_device_train_batch_size=16", "parallel.num_gpus=1",
)  # fmt: skip


def limited(size_bytes: int) -> dict[str, str]:
    """Return an environment in which a process can allocate this much on the first device."""
    total = torch.cuda.get_device_properties(0).total_memory
    return {**visible(0), "PYTORCH_ALLOC_CONF": f"per_process_memory_fraction:{size_bytes / total}"}


def test_out_of_memory_names_kinds_and_a_fix(tmp_path: Path) -> None:
    done = run(*MODEL, f"output_dir={tmp_path / 'run'}", expect=1, env=limited(300 * 2**20))
    error = done.stderr[done.stderr.index("Out of memory on cuda:0") :]
    for text in ("In use by kind: parameters", "The largest parameters are", "The plan predicted"):
        assert text in error
    assert "To fix: set `" in error or "To fix: lower `" in error


def test_micro_batches_become_smaller_until_they_fit(tmp_path: Path) -> None:
    args = (*MODEL, "precision=32", "gradient_checkpointing=none")
    run(*args, f"output_dir={tmp_path / 'plain'}", env=visible(0))
    peak = report(tmp_path / "plain")["peak_memory_bytes"][0]
    stderr = run(
        *args, "auto_find_batch_size=true", f"output_dir={tmp_path / 'auto'}",
        env=limited(round(0.6 * peak)),
    ).stderr  # fmt: skip
    assert "restarting the ranks with micro-batches of 8 × 2 accumulation" in stderr
    # Steps before the restart are repeated.
    expected = losses(tmp_path / "plain")
    assert losses(tmp_path / "auto")[-len(expected) :] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    "settings",
    [
        ("precision=bf16-mixed",),
        ("precision=32",),
        ("precision=bf16-mixed", "gradient_checkpointing=full"),
        ("precision=bf16-mixed", "lora.enable=true"),
        ("precision=bf16-mixed", "lora.enable=true", "gradient_checkpointing=full"),
        ("precision=bf16-mixed", "optim=sgd"),
        ("precision=bf16-true",),
    ],
    ids="-".join,
)
def test_peak_is_at_most_the_prediction(settings: tuple[str, ...], tmp_path: Path) -> None:
    """The plan counts full rows, so it may only be too high."""
    args = (*MODEL, "parallel.mode=single", *settings)
    done = run(*args, "--json", verb="plan", env=visible(0))
    (mode,) = (each for each in json.loads(done.stdout)["modes"] if each["mode"] == "single")
    run(*args, f"output_dir={tmp_path / 'run'}", env=visible(0))
    (peak,) = report(tmp_path / "run")["peak_memory_bytes"]
    predicted = mode["memory_bytes"]["total"]
    assert peak <= predicted * 1.05


def test_expandable_segments_are_used(tmp_path: Path) -> None:
    environment = {
        name: value for name, value in visible(0).items() if not name.startswith("PYTORCH_")
    }
    stderr = run(*MODEL, f"output_dir={tmp_path / 'run'}", env=environment).stderr
    assert "memory: torch's allocator uses expandable segments" in stderr


def test_generation_on_the_device(tmp_path: Path) -> None:
    run(*MODEL, f"output_dir={tmp_path / 'run'}", env=visible(0))
    options = ("What is a tuple?", "--max-new-tokens=8", "--temperature=0", "--json")
    answers = [
        json.loads(run(str(tmp_path / "run"), *options, verb="generate", env=env).stdout)["answer"]
        for env in (visible(0), {**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    ]
    assert answers[0]
    assert answers[0] == answers[1]


def test_doctor_measures_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done = run(
        "model=builtin:qwen2-micro", "dataset=builtin:python-docs#50", "--ranks=1", "--json",
        f"output_dir={tmp_path / 'run'}", verb="doctor", env=visible(0),
    )  # fmt: skip
    result = json.loads(done.stdout)
    assert result["ok"]
