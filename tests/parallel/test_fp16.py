"""float16 with loss scaling under every strategy: losses near float32's, overflows skipped by all
ranks, exact resume."""

import pytest
import torch
from ranks import run_ranks
from states import MemorySource, assemble, copied
from test_skipped import Run, differences
from training import Adapted, Plain

from paceline.distributed.mesh import ParallelDims
from paceline.parallel.loss_scale import GROWTH_INTERVAL, INITIAL_SCALE, LossScaler
from paceline.parallel.save_load import load_state, state_shards
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
STEPS, BAD, SAVED = 7, 2, 4


class HalfFrozen(Adapted):
    """Frozen weights in the compute type, as a model with LoRA is loaded."""

    def __init__(self):
        super().__init__()
        for parameter in self.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.half()


CASES["frozen weights in zero3"] = {"mode": "zero3", "net": HalfFrozen}
CASES["frozen weights in ddp"] = {"mode": "ddp", "net": HalfFrozen}


def saved(run):
    parts = copied(state_shards(run.strategy))
    if run.world.is_rank_zero and run.precision.scaler is not None:
        parts += [
            TensorShard.full(f"scaler/{name}", value)
            for name, value in run.precision.scaler.state().items()
        ]
    return run.world.gather_objects(parts)


def resumed(world, arguments, parts):
    run = Run(world, **arguments, precision="fp16-mixed")
    source = assemble(parts)
    run.precision.scaler.load(
        *(float(source.full[f"scaler/{name}"]) for name in ("scale", "growth_tracker"))
    )
    load_state(run.strategy, source)
    return run


def trains(world):
    results = {}
    for name, arguments in CASES.items():
        half = Run(world, **arguments, precision="fp16-mixed")
        full = Run(world, **{**arguments, "net": Adapted if "frozen" in name else Plain})
        made, scales, parts = [], [], None
        for step in range(STEPS):
            bad = "gradient" if step == BAD else None
            made.append(half.step(step, bad, float("inf"))[0])
            assert full.step(step, bad, float("inf"))[0] == made[-1]
            scales.append(float(half.precision.scaler.scale))
            if step == SAVED:
                parts = saved(half)
        again = resumed(world, arguments, parts)
        for step in range(SAVED + 1, STEPS):
            again.step(step)
        differing = differences(assemble(saved(half)).full, assemble(saved(again)).full)
        results[name] = half.losses, full.losses, made, scales, differing
    world.barrier()
    return results


@pytest.mark.soak
def test_every_strategy():
    first, second = run_ranks(trains, 2)
    for name in CASES:
        half, full, made, scales, differing = first[name]
        assert half == pytest.approx(full, rel=2e-2), name
        assert made == second[name][2] == [step != BAD for step in range(STEPS)], name
        assert (
            scales == second[name][3] == [INITIAL_SCALE] * BAD + [INITIAL_SCALE / 2] * (STEPS - BAD)
        ), name
        assert differing == second[name][4] == [], name


def workers(world):
    """Each worker of local SGD has a scale of its own, which a checkpoint keeps."""
    run = Run(world, "local_sgd", local_sgd={"sync_every": 4}, precision="fp16-mixed")
    made = [run.step(step, "gradient" if step == 1 else None, float("inf"))[0] for step in range(3)]
    parts = saved(run)
    again = resumed(world, {"mode": "local_sgd", "local_sgd": {"sync_every": 4}}, parts)
    scale = float(again.precision.scaler.scale)
    for step in range(3, 9):
        run.step(step)
        again.step(step)
    differing = differences(assemble(saved(run)).full, assemble(saved(again)).full)
    world.barrier()
    return made, scale, differing, run.losses


def test_workers_that_train_on_their_own():
    (first, scale, differing, losses), (second, other_scale, other_differing, _) = run_ranks(
        workers, 2
    )
    assert (first, second) == ([True] * 3, [True, False, True])
    assert (scale, other_scale) == (INITIAL_SCALE, INITIAL_SCALE / 2)
    assert differing == other_differing == []
    assert losses[-1] < losses[0]


def test_the_scale_follows_the_steps():
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


def test_it_never_grows_beyond_float32():
    scaler = LossScaler(torch.device("cpu"))
    scaler.load(2.0**127, GROWTH_INTERVAL - 1)
    scaler.update(True)
    assert float(scaler.scale) == 2.0**127
    assert MemorySource(scaler.state()).tensors()["scale"] == (torch.float64, ())
