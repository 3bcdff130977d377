"""Complete runs with numerical anomalies: skipped updates, replica divergence and rollback after a
loss spike."""

import json
from pathlib import Path

import faulty_task
import numpy as np
import pytest
import torch
import yaml
from commands import digest, events, report, run
from faulty_task import SAMPLES

from paceline.checkpoint import store
from paceline.checkpoint.format import name_of
from paceline.checkpoint.reader import CheckpointReader
from paceline.data.order.samples import SampleOrder

pytestmark = pytest.mark.slow

MICRO_BATCH_SIZE, RANKS, SEED = 8, 2, 7
ORDER = SampleOrder(SAMPLES, MICRO_BATCH_SIZE * RANKS, SEED)
FILE = Path(faulty_task.__file__)


def train(
    folder,
    expect=0,
    recovery=None,
    args=(),
    ranks=RANKS,
    parallel=None,
    train_args=None,
    **task_args,
):
    flags = folder.parent / f"{folder.name}-flags"
    flags.mkdir(exist_ok=True)
    config = {
        "model": "small",
        "dataset": "made-by-the-task",
        "task": f"{FILE}:Faulty",
        "task_args": {"flags": str(flags), **task_args},
        "output_dir": str(folder),
        "parallel": {"num_gpus": ranks, "device": "cpu", **(parallel or {"mode": "ddp"})},
        "recovery": {"max_restarts": 0, **(recovery or {})},
        "train_args": {
            "per_device_train_batch_size": MICRO_BATCH_SIZE * RANKS // ranks,
            "max_steps": 24,
            "learning_rate": 3e-3,
            "lr_scheduler_type": "constant",
            "seed": SEED,
            "save_steps": 4,
            "save_total_limit": None,
            "logging_steps": 1,
            **(train_args or {}),
        },
    }
    file = folder.parent / f"{folder.name}.yaml"
    file.write_text(yaml.safe_dump(config))
    return run(str(file), *args, expect=expect)


def find_samples(step):
    """Return the samples of each rank in a step, counted from 0."""
    return [[int(sample) for sample in part[:, 1]] for part in ORDER.micro_batches(step, RANKS)]


def samples_unique_to(steps, rank=0, until=24):
    """Return, for each of ``steps``, a sample of this rank that no other step before ``until``
    has."""
    samples = []
    for step in steps:
        others = np.concatenate(
            [ORDER.global_batch(other)[:, 1] for other in range(until) if other != step]
        )
        samples.append(next(sample for sample in find_samples(step)[rank] if sample not in others))
    return samples


def read_tensors(folder, step=None):
    path = store.find(folder) if step is None else folder / "checkpoints" / name_of(step)
    with CheckpointReader(path) as reader:
        return {
            name: reader.read(name, (0,) * len(shape), shape)
            for name, (_, shape) in reader.tensors().items()
        }


SKIPPING = [
    {"mode": "ddp"},
    pytest.param({"mode": "zero3"}, marks=pytest.mark.soak),
    pytest.param({"mode": "ddp", "max_grad_norm": 0}, marks=pytest.mark.soak),
]


@pytest.mark.soak
@pytest.mark.parametrize("parallel", SKIPPING, ids=["ddp", "zero3", "unclipped"])
def test_update_with_non_finite_gradient_is_skipped_and_its_rank_reported(tmp_path, parallel):
    clip = parallel.get("max_grad_norm", 1.0)
    settings = {
        "parallel": {"mode": parallel["mode"]},
        "train_args": {"save_steps": 1, "max_grad_norm": clip},
    }
    result = train(tmp_path / "run", bad=samples_unique_to([10], rank=1), **settings)
    assert (
        "step 11: the gradient is not finite (loss of rank 1); the update is skipped"
        in result.stderr
    )
    (event,) = events(tmp_path / "run", "skipped")
    assert (event["step"], event["ranks"], event["cause"], event["updates"]) == (11, [1], "loss", 1)
    assert report(tmp_path / "run")["skipped_steps"] == 1
    assert report(tmp_path / "run")["steps"] == 24
    before, after, later = (read_tensors(tmp_path / "run", step) for step in (10, 11, 12))
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed == {"schedule/step", "data/position"}
    assert all(
        not torch.equal(tensor, after[name])
        for name, tensor in later.items()
        if name.startswith("model/")
    )


@pytest.mark.soak
def test_too_many_consecutive_skips_end_the_run_with_finite_weights(tmp_path):
    folder = tmp_path / "run"
    bad = samples_unique_to(range(6, 10))
    result = train(
        folder, expect=1, recovery={"max_consecutive_skips": 3, "max_restarts": 3}, bad=bad
    )
    assert (
        "3 consecutive steps (up to step 9) had non-finite gradients (loss of rank 0)"
        in result.stderr
    )
    assert "recovery.max_consecutive_skips" in result.stderr
    assert len(events(folder, "run_start")) == 1  # no restart, since the fault would recur
    good = {
        name: tensor
        for name, tensor in read_tensors(folder, 9).items()
        if name.startswith(("model/", "optimizer/"))
    }
    assert all(bool(tensor.isfinite().all()) for tensor in good.values())
    # the resumed run counts from zero, and finishes
    train(folder, recovery={"max_consecutive_skips": 3, "max_restarts": 3}, bad=bad)
    assert report(folder)["resumed_from_step"] == 9
    assert report(folder)["skipped_steps"] == 4


@pytest.mark.soak
def test_only_consecutive_skips_end_the_run(tmp_path):
    """A step with a finite gradient resets the count of consecutive skips."""
    train(tmp_path / "run", recovery={"max_consecutive_skips": 2}, bad=samples_unique_to([5, 7, 9]))
    assert report(tmp_path / "run")["skipped_steps"] == 3


@pytest.mark.soak
def test_skips_of_local_sgd_workers_are_reported(tmp_path):
    folder = tmp_path / "run"
    local = {"parallel": {"mode": "local_sgd"}, "train_args": {"logging_steps": 4}}
    result = train(folder, bad=samples_unique_to([9, 10], rank=1), **local)
    assert "rank 1 independently skipped up to 2 updates before this step" in result.stderr
    (event,) = events(folder, "skipped")
    assert (event["step"], event["ranks"], event["updates"]) == (12, [1], 2)
    assert report(folder)["skipped_steps"] == 2
    ended = train(
        tmp_path / "ended",
        expect=1,
        recovery={"max_consecutive_skips": 2},
        bad=samples_unique_to([10, 11], rank=1),
        **local,
    )
    assert "2 consecutive steps (up to step 12) had non-finite gradients (rank 1)" in ended.stderr


@pytest.mark.soak
def test_divergent_replica_is_reported_and_not_saved(tmp_path):
    folder = tmp_path / "run"
    flip = {"rank": 1, "call": 6, "name": "2.weight"}
    result = train(
        folder, expect=1, ranks=3, train_args={"per_device_train_batch_size": 5}, flip=flip
    )
    assert "rank 1 (host " in result.stderr
    assert "differs from the replicas on ranks 0, 2" in result.stderr
    assert "`2.weight`" in result.stderr
    (event,) = events(folder, "drift")
    assert (event["step"], event["ranks"]) == (8, [1])
    assert [path.name for path in store.committed(folder / "checkpoints")] == ["step-00000004"]
    train(folder, ranks=3, train_args={"per_device_train_batch_size": 5}, flip=flip)
    train(tmp_path / "even", ranks=3, train_args={"per_device_train_batch_size": 5})
    assert digest(folder) == digest(tmp_path / "even")


@pytest.mark.soak
def test_replicas_are_compared_between_checkpoints(tmp_path):
    settings = {"train_args": {"save_steps": 0}, "flip": {"rank": 0, "call": 6, "name": "0.bias"}}
    result = train(tmp_path / "run", expect=1, recovery={"replica_check_steps": 7}, **settings)
    assert "step 7" in result.stderr
    assert "rank 0 (host " in result.stderr
    assert "rank 1 (host " in result.stderr
    assert "without a majority" in result.stderr
    train(tmp_path / "off", recovery={"replica_check_steps": 0}, **settings)
    assert events(tmp_path / "off", "drift") == []


ROLLBACK = {
    "rollback_on_loss_spike": True,
    "loss_spike_factor": 30,
    "loss_spike_window": 6,
    "max_restarts": 2,
}


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rolled_back") / "run"
    return folder, train(folder, recovery=ROLLBACK, bad=samples_unique_to([10], rank=1), times=1e6)


@pytest.mark.soak
def test_loss_spike_is_rolled_back_and_its_batch_skipped(rolled_back):
    folder, result = rolled_back
    assert "step 11: the loss spiked to" in result.stderr
    assert "rolling back to step 8 and skipping the batch of this step" in result.stderr
    (event,) = events(folder, "rollback")
    assert (event["step"], event["to_step"]) == (11, 8)
    assert event["loss"] > 30 * event["median"]
    final = report(folder)
    assert final["data"]["skipped_batches"] == {"steps": [11], "samples": 16}
    assert final["samples_seen"] == 24 * 16 - 16
    assert final["restarts"] == 0
    assert final["final_train_loss"] < final["first_train_loss"]
    steps = [event["step"] for event in events(folder, "step")]
    assert steps == [*range(1, 11), 9, 10, *range(12, 25)]
    assert json.loads((store.find(folder) / "meta.json").read_text())["skipped_batches"] == [10]


@pytest.mark.soak
@pytest.mark.parametrize(
    "parallel",
    [{"mode": "zero1"}, {"mode": "zero3"}, {"mode": "deepspeed"}],
    ids=lambda parallel: parallel["mode"],
)
def test_rollback_in_each_strategy(rolled_back, tmp_path, parallel):
    train(
        tmp_path / "run",
        recovery=ROLLBACK,
        bad=samples_unique_to([10], rank=1),
        times=1e6,
        parallel=parallel,
    )
    assert report(tmp_path / "run")["data"]["skipped_batches"]["steps"] == [11]
    actual, expected = (read_tensors(folder) for folder in (tmp_path / "run", rolled_back[0]))
    for name, tensor in expected.items():
        if name.startswith("model/"):
            assert torch.allclose(actual[name], tensor, rtol=1e-4, atol=1e-6), name


@pytest.mark.soak
def test_rollback_is_reproducible_with_and_without_restart(rolled_back, tmp_path):
    bad = {"bad": samples_unique_to([10], rank=1), "times": 1e6}
    train(tmp_path / "again", recovery=ROLLBACK, **bad)
    assert digest(tmp_path / "again") == digest(rolled_back[0])
    # If a rank is killed between the rollback and the next checkpoint, the rollback recurs. If it
    # is killed after that checkpoint, the skipped batch is read from the checkpoint.
    for step, rollbacks in ((11, 2), (14, 1)):
        folder = tmp_path / f"killed-{step}"
        train(
            folder,
            recovery=ROLLBACK,
            **bad,
            die=samples_unique_to([step], rank=0)[0],
            train_args={"async_save": False},
        )
        assert digest(folder) == digest(rolled_back[0])
        assert report(folder)["data"]["skipped_batches"] == {"steps": [11], "samples": 16}
        assert (len(events(folder, "rollback")), report(folder)["restarts"]) == (rollbacks, 1)


@pytest.mark.soak
def test_non_finite_loss_without_a_checkpoint_skips_only_its_batch(
    tmp_path,
):
    result = train(tmp_path / "run", recovery=ROLLBACK, bad=samples_unique_to([2]), times="nan")
    assert (
        "step 3: the loss spiked to nan; there is no earlier checkpoint, so only the batch"
        in result.stderr
    )
    assert report(tmp_path / "run")["data"]["skipped_batches"] == {"steps": [3], "samples": 16}
    assert report(tmp_path / "run")["skipped_steps"] == 0
    assert events(tmp_path / "run", "rollback")[0]["to_step"] == 2


@pytest.mark.soak
def test_number_of_rollbacks_is_limited(tmp_path):
    folder = tmp_path / "run"
    result = train(
        folder,
        recovery={**ROLLBACK, "max_restarts": 1},
        bad=samples_unique_to([9, 10], rank=1),
        times=1e6,
    )
    assert [event["step"] for event in events(folder, "rollback")] == [10]
    assert "so this one is kept" in result.stderr
    assert report(folder)["data"]["skipped_batches"]["steps"] == [10]


@pytest.mark.soak
@pytest.mark.parametrize(
    "parallel", [{"mode": "local_sgd"}, {"mode": "diloco"}], ids=lambda parallel: parallel["mode"]
)
def test_independent_workers_cannot_roll_back(tmp_path, parallel):
    result = train(tmp_path / "run", expect=2, recovery=ROLLBACK, parallel=parallel)
    assert "rollback_on_loss_spike" in result.stderr
    assert not (tmp_path / "run").exists()
