"""Non-finite gradients: all ranks skip the update, and training continues as without the step."""

import pytest
import torch
from ranks import run_ranks
from states import copy_shards
from strategy_training import ROWS, VOCABULARY, Net, Plain
from torch.nn import functional

from paceline.config.schema import Config
from paceline.distributed.communicator import Communicator
from paceline.distributed.mesh import ParallelDims
from paceline.health.anomalies import UpdateDecision
from paceline.parallel.strategy import make_strategy
from paceline.train.optimizers.build import build_optimizer, matrices_of
from paceline.train.precision import Precision

FAULTY_RANK = 1


class Run:
    """A strategy that trains a small model. In some steps, the loss or one gradient of a rank is
    made NaN or infinite."""

    def __init__(
        self, world, mode, axes=None, net=Plain, clip=0.5, optim="adamw", precision="32", **settings
    ):
        self.world = Communicator(world.env, world.device, axes) if axes is not None else world
        self.config = Config(
            model="m",
            dataset="d",
            parallel={"mode": mode, "bucket_cap_mb": 0.01, **settings.pop("parallel", {})},
            train_args={
                "weight_decay": 0.1,
                "max_grad_norm": clip,
                "optim": optim,
                "precision": precision,
            },
            **settings,
        )
        self.precision = Precision(self.config.train_args, self.world)
        self.strategy = make_strategy(mode, self.config, self.world)
        torch.manual_seed(self.world.rank)
        built = net().eval()
        matrices = matrices_of(built)
        self.model = self.strategy.setup(built)
        args = self.config.train_args
        self.strategy.setup_optimizer(lambda named: build_optimizer(args, 3e-3, named, matrices))
        self.strategy.scaler = self.precision.scaler
        self.losses = []

    def step(self, step, fault=None, value=float("nan")):
        """Run a step. Return whether the update was applied, whether this rank's gradient was
        finite (None if unknown), and whether the norm was.

        Args:
            fault: None, "loss" or "gradient" (of a single parameter): what becomes ``value``.
        """
        rows = ROWS // self.world.axes.replicas
        tokens = torch.randint(
            0, VOCABULARY, (ROWS,), generator=torch.Generator().manual_seed(step)
        )
        replica = self.strategy.replica
        local = tokens[replica * rows : (replica + 1) * rows]
        # the last stage has the loss
        faulty_rank = FAULTY_RANK if self.world.axes.pipeline == 1 else self.world.size - 1
        is_faulty = fault is not None and self.world.rank == faulty_rank

        def micro_step(number, module):
            with self.precision.autocast():
                logits = module(local).float()
            if is_faulty and fault == "gradient":
                logits.register_hook(lambda gradient: torch.full_like(gradient, value))
            loss = (
                functional.cross_entropy(logits, (local * 7 + 1) % VOCABULARY, reduction="sum")
                / ROWS
            )
            losses.append(float(loss.detach()))
            return self.precision.scale(loss * value if is_faulty and fault == "loss" else loss)

        losses = []
        self.strategy.forward_backward(micro_step, 1)
        self.losses.append(self.world.sum(sum(losses) if self.strategy.reports_loss else 0.0)[0])
        self.strategy.unscale_gradients()
        norm = self.strategy.clip_grad_norm(self.config.train_args.max_grad_norm)
        local_finite = self.strategy.local_grad_finite()
        checked_norm = None if self.strategy.handles_overflow else norm
        updated = self.strategy.optimizer_step(
            lambda optimizer: self.precision.step(optimizer, UpdateDecision(checked_norm))
        )
        if self.strategy.handles_overflow:
            self.precision.update_scale(updated)
        is_finite = None if local_finite is None else bool(local_finite.isfinite())
        return updated, is_finite, bool(norm.isfinite())

    def state(self):
        """Return all state of this rank that the next steps depend on, except step counters."""
        counters = ("compression/step", "local/steps")
        state = {
            shard.name: shard.tensor
            for shard in copy_shards(self.strategy.state_shards())
            if shard.name not in counters
        }
        for name, tensor in self.strategy.replicated_tensors():
            state[f"replicated {name}"] = tensor.detach().clone()
        return state


def changed_names(ours, theirs):
    assert ours.keys() == theirs.keys()
    return [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]


def skip_a_step(world, arguments, kind, value):
    """Return, for this rank, the tensors that a faulty step changed, those that differ from a run
    without that step, and the results of the faulty step."""
    with_fault, without = Run(world, **arguments), Run(world, **arguments)
    for step in range(2):
        assert with_fault.step(step)[0]
        assert without.step(step)[0]
    before = with_fault.state()
    outcome = with_fault.step(2, kind, value)
    changed = changed_names(before, with_fault.state())
    for step in range(3, 5):
        assert with_fault.step(step)[0]
        assert without.step(step)[0]
    mismatches = changed_names(with_fault.state(), without.state())
    world.barrier()
    return changed, mismatches, outcome


NET = {"net": Net}
CASES = {
    "ddp": (3, {"mode": "ddp", **NET}),
    "ddp without clipping": (2, {"mode": "ddp", "clip": 0.0, **NET}),
    "ddp with sgd": (2, {"mode": "ddp", "optim": "sgd", **NET}),
    "ddp with a ring all-reduce": (
        3,
        {"mode": "ddp", "parallel": {"all_reduce_algorithm": "ring"}, **NET},
    ),
    "zero1": (3, {"mode": "zero1", **NET}),
    "zero2": (2, {"mode": "zero2", **NET}),
    "zero3": (2, {"mode": "zero3", **NET}),
    "hybrid sharding": (4, {"mode": "zero3", "axes": ParallelDims(data=2, shard=2), **NET}),
    "deepspeed 1": (2, {"mode": "deepspeed", "parallel": {"deepspeed_stage": 1}}),
    "deepspeed 2": (2, {"mode": "deepspeed", "parallel": {"deepspeed_stage": 2}}),
    "deepspeed 3": (2, {"mode": "deepspeed", "parallel": {"deepspeed_stage": 3}}),
    "pipeline": (2, {"mode": "pipeline", "axes": ParallelDims(pipeline=2)}),
    "replicas of a pipeline": (4, {"mode": "pipeline", "axes": ParallelDims(data=2, pipeline=2)}),
    "topk": (2, {"mode": "ddp", "compression": {"method": "topk", "ratio": 0.1}, **NET}),
    "topk with sgd": (
        2,
        {"mode": "ddp", "compression": {"method": "topk", "ratio": 0.1}, "optim": "sgd", **NET},
    ),
    "powersgd": (2, {"mode": "ddp", "compression": {"method": "powersgd", "rank": 2}, **NET}),
    "signsgd": (2, {"mode": "ddp", "compression": {"method": "signsgd"}, "optim": "sgd", **NET}),
    "bf16 messages": (2, {"mode": "ddp", "compression": {"method": "bf16"}, **NET}),
}
#: Modes in which the local gradient shows which rank had the fault.
RANK_IS_KNOWN = (
    "ddp",
    "ddp without clipping",
    "ddp with sgd",
    "ddp with a ring all-reduce",
    "zero1",
    "topk",
    "topk with sgd",
    "powersgd",
    "signsgd",
    "bf16 messages",
)


#: One case of each kind; `make soak` runs the others.
QUICK = ("ddp", "zero1", "zero3", "deepspeed 2", "pipeline", "topk")


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in CASES],
)
@pytest.mark.parametrize(("kind", "value"), [("loss", float("nan")), ("gradient", float("inf"))])
def test_skipped_step_changes_no_state(name, kind, value):
    world_size, arguments = CASES[name]
    results = run_ranks(skip_a_step, world_size, arguments, kind, value)
    for rank, (changed, mismatches, (updated, local_is_finite, norm_is_finite)) in enumerate(
        results
    ):
        assert not updated
        assert changed == []
        # The votes of zero elements depend on the step number, which includes skipped steps.
        assert mismatches == [] or name == "signsgd"
        if name in RANK_IS_KNOWN:
            assert local_is_finite == (rank != FAULTY_RANK)
        if "deepspeed" not in name:
            assert not norm_is_finite


def skip_with_few_elements(world):
    """Skip a step of `randomk`, which sends few elements: a NaN that it does not send must not
    remain in the residual."""
    run = Run(world, "ddp", compression={"method": "randomk", "ratio": 0.01}, optim="sgd", net=Net)
    run.step(0)
    before = run.state()

    def micro_step(number, module):
        if world.rank == FAULTY_RANK:
            module.scale.register_hook(lambda gradient: gradient * float("nan"))
        return sum(
            parameter.square().sum() for parameter in module.parameters() if parameter.requires_grad
        )

    run.strategy.forward_backward(micro_step, 1)
    norm = run.strategy.clip_grad_norm(0.5)
    updated = run.strategy.optimizer_step(
        lambda optimizer: run.precision.step(optimizer, UpdateDecision(norm))
    )
    return updated, changed_names(before, run.state())


def test_non_finite_value_does_not_remain_in_residual():
    assert run_ranks(skip_with_few_elements, 2) == [(False, [])] * 2


def skip_in_a_worker(world):
    run = Run(world, "local_sgd", local_sgd={"sync_every": 4}, net=Plain)
    updates, finite = [], []
    for step in range(8):
        before = {name: tensor.detach().clone() for name, tensor in run.strategy.trained.items()}
        updates.append(run.step(step, "loss" if step in (1, 2) else None)[0])
        changed = changed_names(before, run.strategy.trained)
        assert bool(changed) == updates[-1]
        finite.append(
            all(bool(tensor.isfinite().all()) for tensor in run.strategy.trained.values())
        )
    return updates, all(finite), run.strategy.is_synchronized, dict(run.strategy.trained)


def test_local_sgd_worker_skips_independently():
    (first, *_, ours), (second, finite, synchronized, theirs) = run_ranks(skip_in_a_worker, 2)
    assert first == [True] * 8
    assert second == [True, False, False, *[True] * 5]
    assert finite
    assert synchronized
    assert changed_names(ours, theirs) == []


@pytest.mark.parametrize("optim", ["adamw", "adam"])
def test_fused_optimizer_skips_on_the_device(optim):
    """The optimizer reads the flag on the device, which is the CPU in this test."""
    from paceline.distributed.environment import RankEnv
    from paceline.health.anomalies import skips_on_device

    config = Config(model="m", dataset="d", train_args={"optim": optim})
    model = Plain()
    named = list(model.named_parameters())
    optimizer = build_optimizer(config.train_args, 1e-2, named, matrices_of(model))
    precision = Precision(config.train_args, Communicator(RankEnv(), torch.device("cpu")))
    assert skips_on_device(optimizer, torch.tensor(1.0))

    def state():
        values = [value for entries in optimizer.state.values() for value in entries.values()]
        return [tensor.detach().clone() for tensor in (*model.parameters(), *values)]

    for value in (1.0, float("nan"), float("inf")):
        for _, parameter in named:
            parameter.grad = torch.full_like(parameter, value)
        before = state()
        assert precision.step(optimizer, UpdateDecision(torch.tensor(value), on_device=True))
        unchanged = len(before) == len(state()) and all(
            torch.equal(a, b) for a, b in zip(before, state(), strict=True)
        )
        assert unchanged == (value != 1.0)
    assert not hasattr(optimizer, "found_inf")
