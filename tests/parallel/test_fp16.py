"""float16 with loss scaling in every strategy: losses close to float32, overflows skipped by all
ranks, and exact resume."""

import pytest
import torch
from ranks import run_ranks
from states import MemorySource, assemble, copy_shards
from strategy_training import Adapted, Plain
from test_skipped import Run, changed_names

from paceline.distributed.mesh import ParallelDims
from paceline.parallel.loss_scale import GROWTH_INTERVAL, INITIAL_SCALE, LossScaler
from paceline.parallel.save_load import load_state
from paceline.parallel.state import TensorShard

TOPK = {"method": "topk", "ratio": 0.1}
CASES = {
    "ddp": {"mode": "ddp"},
    "zero1": {"mode": "zero1"},
    "zero2": {"mode": "zero2"},
    "zero3": {"mode": "zero3"},
    "pipeline": {"mode": "pipeline", "axes": ParallelDims(pipeline=2)},
    "deepspeed 1": {"mode": "deepspeed", "parallel": {"deepspeed_stage": 1}},
    "deepspeed 2": {"mode": "deepspeed", "parallel": {"deepspeed_stage": 2}},
    "deepspeed 3": {"mode": "deepspeed", "parallel": {"deepspeed_stage": 3}},
    "topk": {"mode": "ddp", "compression": TOPK},
    "topk with sgd": {"mode": "ddp", "compression": TOPK, "optim": "sgd"},
    "powersgd": {"mode": "ddp", "compression": {"method": "powersgd", "rank": 2}},
    "fp16 messages": {"mode": "ddp", "compression": {"method": "fp16"}},
}
STEPS, OVERFLOW_STEP, SAVED_STEP = 7, 2, 4


class HalfFrozen(Adapted):
    """A model with frozen weights in the compute dtype, like a model that is loaded for LoRA."""

    def __init__(self):
        super().__init__()
        for parameter in self.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.half()


CASES["frozen weights in zero3"] = {"mode": "zero3", "net": HalfFrozen}
CASES["frozen weights in ddp"] = {"mode": "ddp", "net": HalfFrozen}


def gather_shards(run):
    shards = copy_shards(run.strategy.state_shards())
    if run.world.is_rank_zero and run.precision.scaler is not None:
        shards += [
            TensorShard.full(f"scaler/{name}", value)
            for name, value in run.precision.scaler.state().items()
        ]
    return run.world.gather_objects(shards)


def resume_run(world, arguments, shards):
    run = Run(world, **arguments, precision="fp16-mixed")
    source = assemble(shards)
    run.precision.scaler.load(
        *(float(source.full[f"scaler/{name}"]) for name in ("scale", "growth_tracker"))
    )
    load_state(run.strategy, source)
    return run


def train_and_resume_each(world):
    results = {}
    for name, arguments in CASES.items():
        half = Run(world, **arguments, precision="fp16-mixed")
        full = Run(world, **{**arguments, "net": Adapted if "frozen" in name else Plain})
        updated, scales, shards = [], [], None
        for step in range(STEPS):
            fault = "gradient" if step == OVERFLOW_STEP else None
            updated.append(half.step(step, fault, float("inf"))[0])
            assert full.step(step, fault, float("inf"))[0] == updated[-1]
            scales.append(float(half.precision.scaler.scale))
            if step == SAVED_STEP:
                shards = gather_shards(half)
        resumed = resume_run(world, arguments, shards)
        for step in range(SAVED_STEP + 1, STEPS):
            resumed.step(step)
        mismatches = changed_names(
            assemble(gather_shards(half)).full, assemble(gather_shards(resumed)).full
        )
        results[name] = half.losses, full.losses, updated, scales, mismatches
    world.barrier()
    return results


@pytest.mark.soak
def test_strategies_match_float32_and_skip_overflows_together():
    first, second = run_ranks(train_and_resume_each, 2)
    for name in CASES:
        half, full, updated, scales, mismatches = first[name]
        assert half == pytest.approx(full, rel=2e-2), name
        assert updated == second[name][2] == [step != OVERFLOW_STEP for step in range(STEPS)], name
        assert (
            scales
            == second[name][3]
            == [INITIAL_SCALE] * OVERFLOW_STEP + [INITIAL_SCALE / 2] * (STEPS - OVERFLOW_STEP)
        ), name
        assert mismatches == second[name][4] == [], name


def train_and_resume_workers(world):
    """Train two workers of local SGD, each with its own loss scale, and resume them."""
    run = Run(world, "local_sgd", local_sgd={"sync_every": 4}, precision="fp16-mixed")
    updated = [
        run.step(step, "gradient" if step == 1 else None, float("inf"))[0] for step in range(3)
    ]
    shards = gather_shards(run)
    resumed = resume_run(world, {"mode": "local_sgd", "local_sgd": {"sync_every": 4}}, shards)
    scale = float(resumed.precision.scaler.scale)
    for step in range(3, 9):
        run.step(step)
        resumed.step(step)
    mismatches = changed_names(
        assemble(gather_shards(run)).full, assemble(gather_shards(resumed)).full
    )
    world.barrier()
    return updated, scale, mismatches, run.losses


def test_local_sgd_workers_have_separate_loss_scales():
    (first, scale, mismatches, losses), (second, other_scale, other_mismatches, _) = run_ranks(
        train_and_resume_workers, 2
    )
    assert (first, second) == ([True] * 3, [True, False, True])
    assert (scale, other_scale) == (INITIAL_SCALE, INITIAL_SCALE / 2)
    assert mismatches == other_mismatches == []
    assert losses[-1] < losses[0]


def test_scale_grows_and_backs_off():
    scaler = LossScaler(torch.device("cpu"))
    for _ in range(GROWTH_INTERVAL - 1):
        scaler.update(True)
    assert float(scaler.scale) == INITIAL_SCALE
    scaler.update(torch.tensor(True))
    assert float(scaler.scale) == 2 * INITIAL_SCALE
    scaler.update(False)
    scaler.update(torch.tensor(False))
    assert float(scaler.scale) == INITIAL_SCALE / 2
    scaler.update(True)
    other = LossScaler(torch.device("cpu"))
    other.load(**{name: float(value) for name, value in scaler.state().items()})
    assert (float(other.scale), int(other.growth_tracker)) == (INITIAL_SCALE / 2, 1)
    gradients = [torch.tensor([3.0, 2.0**-20]) * other.scale]
    other.unscale(gradients)
    assert torch.equal(gradients[0], torch.tensor([3.0, 2.0**-20]))


def test_scale_stays_within_float32():
    scaler = LossScaler(torch.device("cpu"))
    scaler.load(2.0**127, GROWTH_INTERVAL - 1)
    scaler.update(True)
    assert float(scaler.scale) == 2.0**127
    assert MemorySource(scaler.state()).tensors()["scale"] == (torch.float64, ())
