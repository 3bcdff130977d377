"""Test that a run resumes with any number of replicas, with the same global batches and losses."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import MICRO, events, report, run, train
from test_resume_modes import ARGS, losses_by_step

pytestmark = pytest.mark.slow

# Micro-batches of 4 samples on 4 ranks: 16 samples, which three replicas share as 6+5+5.
RANKS = 4
DATA = {
    "packed": ("packing=true",),
    "padded": ("packing=false",),
    "images": ("model=builtin:small-cnn", "task=classify", "dataset=builtin:digits#240"),
}


def live(folder: Path, kind: str, ranks: int, until: int, *args: str) -> str:
    defaults = [
        setting
        for setting in MICRO
        if not any(arg.startswith(setting.partition("=")[0] + "=") for arg in DATA[kind])
    ]
    defaults += [f"output_dir={folder}", *DATA[kind], *ARGS, "split_dataset_ratio=0.1"]
    defaults += [
        f"parallel.num_gpus={ranks}",
        f"train_args.max_steps={until}",
        "eval_steps=2",
        "--allow-config-change",
        *args,
    ]
    return run(*defaults).stderr


def eval_losses(folder: Path) -> list[float]:
    return [event["loss"] for event in events(folder, "eval")]


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["packed", "images", "padded"])
def test_changing_world_size_keeps_losses(tmp_path: Path, kind: str) -> None:
    world_sizes = (4, 3, 1, 4)
    steps = 2 * len(world_sizes)
    live(tmp_path / "whole", kind, RANKS, steps, "parallel.mode=ddp")
    for number, ranks in enumerate(world_sizes, start=1):
        output = live(tmp_path / "elastic", kind, ranks, 2 * number, "parallel.mode=ddp")
        started = events(tmp_path / "elastic", "run_start")[-1]["derived"]
        assert started["global_batch_size"] == 16
        assert started["gradient_accumulation_steps"] == {4: 1, 3: 2, 1: 4}[ranks]
        # logged once as a message and once in the summary table
        assert output.count("6+5+5") == (2 if ranks == 3 else 0)
    assert losses_by_step(tmp_path / "elastic") == pytest.approx(
        losses_by_step(tmp_path / "whole"), rel=1e-5
    )
    losses, expected = eval_losses(tmp_path / "elastic"), eval_losses(tmp_path / "whole")
    assert losses[-1] == pytest.approx(expected[-1], rel=1e-5)
    assert len(expected) >= 2
    last, reference = report(tmp_path / "elastic"), report(tmp_path / "whole")
    assert last["samples_seen"] == reference["samples_seen"] == 16 * steps
    assert last["epochs"] == reference["epochs"]


@pytest.mark.soak
def test_rejects_more_replicas_than_samples(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    args = (*ARGS, "train_args.max_steps=2", "per_device_train_batch_size=1", "parallel.mode=ddp")
    defaults = [setting for setting in MICRO if "batch_size" not in setting]
    run(*defaults, f"output_dir={folder}", *args, "parallel.num_gpus=1")
    args = (*args[:-3], "train_args.max_steps=4", "--allow-config-change", *args[-2:])
    refused = run(*defaults, f"output_dir={folder}", *args, "parallel.num_gpus=2", expect=2)
    error = refused.stderr[refused.stderr.rindex("error: ") :].strip()
    assert "\n" not in error
    assert "global batch of 1 sample cannot be shared among 2 replicas" in error
    assert "`parallel.num_gpus` to at most 1" in error


@pytest.fixture(scope="module")
def reference_and_begun(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Path, Path]]:
    """Return a function that maps the kind of data to two cached runs on four ranks: a complete one
    of six steps, and one that ended at step 3."""

    @functools.cache
    def make(kind: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(kind)
        live(folder / "whole", kind, RANKS, 6, "parallel.mode=ddp")
        live(folder / "begun", kind, RANKS, 3, "parallel.mode=ddp")
        return folder / "whole", folder / "begun"

    return make


@pytest.mark.soak
@pytest.mark.parametrize(
    ("mode", "ranks"),
    [
        ("parallel.mode=zero1", 3),
        ("parallel.mode=zero2", 3),
        ("parallel.mode=zero3", 3),
        ("parallel.mode=deepspeed parallel.deepspeed_stage=2", 3),
        ("parallel.mode=deepspeed parallel.deepspeed_stage=3", 3),
        ("parallel.tensor=2 parallel.data=3", 6),
        ("parallel.pipeline=2 parallel.data=3", 6),
        ("parallel.shard=3 parallel.pipeline=2", 6),
    ],
)
@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_strategy_resumes_on_three_replicas(
    tmp_path: Path,
    kind: str,
    mode: str,
    ranks: int,
    reference_and_begun: Callable[[str], tuple[Path, Path]],
) -> None:
    reference, begun = reference_and_begun(kind)
    shutil.copytree(begun, tmp_path / "run", symlinks=True)
    output = live(tmp_path / "run", kind, ranks, 6, *mode.split())
    assert "6+5+5" in output
    assert losses_by_step(tmp_path / "run") == pytest.approx(losses_by_step(reference), rel=1e-5)
    assert eval_losses(tmp_path / "run")[-1] == pytest.approx(eval_losses(reference)[-1], rel=1e-5)


@pytest.mark.soak
def test_save_interval_in_seconds(tmp_path: Path) -> None:
    """A very short interval saves each step exactly once; a very long one saves only the last."""
    args = (
        "parallel.num_gpus=2",
        "max_steps=5",
        "save_steps=0",
        "train_args.save_total_limit=null",
    )
    train(tmp_path / "often", *args, "async_save=false", "recovery.save_interval_s=0.000001")
    assert [event["step"] for event in events(tmp_path / "often", "checkpoint")] == [1, 2, 3, 4, 5]
    train(tmp_path / "seldom", *args, "recovery.save_interval_s=3600")
    assert [event["step"] for event in events(tmp_path / "seldom", "checkpoint")] == [5]
