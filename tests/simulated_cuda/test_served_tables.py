"""Test `parameter_server` with workers on simulated CUDA devices and servers on the CPU: the losses
are those of workers on the CPU, a resumed run has the digest of an uninterrupted one, and what is
not supported is refused."""

import json
from pathlib import Path

import pytest
import served_task
from commands import digest, losses, report
from device_runs import run_on
from switches import TOLERANCES

from paceline.parallel.support_table import COLUMNS, Settings, reason_against, rows

pytestmark = pytest.mark.slow

CLICKS = ("model=builtin:dlrm", "dataset=builtin:clicks#400", "split_dataset_ratio=0.1")
SERVER = ("parallel.mode=parameter_server", "per_device_train_batch_size=16")
TWO_WORKERS = ("parallel.num_gpus=2", "gradient_accumulation_steps=2")


def train_served(device: str, folder: Path, *args: str, max_steps: int = 3) -> None:
    task = f"task={served_task.__file__}:ServedClicks"
    options = (f"task_args.device={device}", f"max_steps={max_steps}", f"output_dir={folder}")
    run_on(device, *CLICKS, *SERVER, task, *options, *args)


@pytest.mark.parametrize(
    ("precision", "args"),
    [
        pytest.param("32", TWO_WORKERS, id="dense-on-workers", marks=pytest.mark.soak),
        pytest.param(
            "32",
            (
                *TWO_WORKERS,
                "parameter_server.dense_placement=server",
                "parameter_server.num_servers=2",
            ),
            id="dense-on-servers",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "32",
            (*TWO_WORKERS, "parameter_server.on_worker_failure=continue"),
            id="collectives-through-the-server",
            marks=pytest.mark.soak,
        ),
        # With one worker, its updates always have the same order.
        pytest.param(
            "32",
            ("parallel.num_gpus=1", "parameter_server.consistency=async"),
            id="async",
            marks=pytest.mark.soak,
        ),
        pytest.param("bf16-mixed", TWO_WORKERS, id="bf16-mixed", marks=pytest.mark.soak),
    ],
)
def test_losses_are_those_of_workers_on_the_cpu(
    precision: str, args: tuple[str, ...], tmp_path: Path
) -> None:
    for device in ("cuda", "cpu"):
        train_served(device, tmp_path / device, f"precision={precision}", *args)
    on_cuda, on_cpu = (report(tmp_path / device) for device in ("cuda", "cpu"))
    assert (on_cuda["device"], on_cuda["status"]) == ("cuda", "done")
    tolerance = TOLERANCES[precision]
    assert losses(tmp_path / "cuda") == pytest.approx(losses(tmp_path / "cpu"), rel=tolerance)
    assert on_cuda["final_eval_loss"] == pytest.approx(on_cpu["final_eval_loss"], rel=tolerance)
    assert on_cuda["traffic_bytes_per_step"] == on_cpu["traffic_bytes_per_step"]
    assert on_cuda["state_memory_bytes"] == on_cpu["state_memory_bytes"]


@pytest.mark.soak
@pytest.mark.parametrize("placement", ["ddp", "server"])
def test_resumed_run_has_the_digest_of_an_uninterrupted_run(placement: str, tmp_path: Path) -> None:
    args = (
        *TWO_WORKERS, f"parameter_server.dense_placement={placement}", "precision=32",
        "lr_scheduler_type=constant",
    )  # fmt: skip
    train_served("cuda", tmp_path / "whole", *args, max_steps=4)
    for step in (2, 4):
        train_served("cuda", tmp_path / "resumed", *args, "--allow-config-change", max_steps=step)
    assert report(tmp_path / "resumed")["resumed_from_step"] == 2
    assert digest(tmp_path / "resumed") == digest(tmp_path / "whole")


FP16, RECOMPUTE = "`fp16-mixed`", "recompute"
(ROW,) = (row for row in rows() if row[1] == "parameter_server")
LORA = "`lora.enable: true` is not supported with `task: recommend`"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        pytest.param(COLUMNS[FP16], reason_against(*ROW[1:], COLUMNS[FP16]), id="fp16-mixed"),
        pytest.param(
            COLUMNS[RECOMPUTE],
            reason_against(*ROW[1:], COLUMNS[RECOMPUTE]),
            id="recompute",
            marks=pytest.mark.soak,
        ),
        pytest.param({"lora": {"enable": True}}, LORA, id="lora", marks=pytest.mark.soak),
    ],
)
def test_what_it_does_not_support_is_refused(
    settings: Settings, reason: str, tmp_path: Path
) -> None:
    args = [
        f"{section}.{key}={json.dumps(value)}"
        for section, values in settings.items()
        for key, value in values.items()
    ]
    folder = tmp_path / "run"
    options = ("task=recommend", "parallel.num_gpus=2", f"output_dir={folder}")
    done = run_on("cuda", *CLICKS, *SERVER, *options, *args, expect=2)
    assert reason in done.stderr
    assert not folder.exists()
