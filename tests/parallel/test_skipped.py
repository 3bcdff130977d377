"""A gradient that is not finite: the update is skipped on all ranks, as if the step had not been
made."""

import pytest
import torch
from ranks import run_ranks
from states import copied
from torch.nn import functional
from training import ROWS, VOCABULARY, Net, Plain

from paceline.config.schema import Config
from paceline.distributed.communicator import Communicator
from paceline.distributed.mesh import ParallelDims
from paceline.health.anomalies import UpdateDecision
from paceline.parallel.base import make_strategy
from paceline.parallel.protocols import local_grad_finite, replica_of, reports_loss, unscale_grads
from paceline.parallel.save_load import state_shards
from paceline.train.optimizer import build_optimizer, matrices_of
from paceline.train.precision import Precision

BAD_RANK = 1


class Run:
    """A strategy that trains a small model; at some steps a rank's loss, or only one gradient, is
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

    def step(self, step, bad=None, value=float("nan")):
        """Run a step. Returns whether the update was made, whether this rank's gradient was finite
        (None: unknown), and whether the norm was. ``bad``: None, "loss", or "gradient" (only that
        of one parameter)."""
        rows = ROWS // self.world.axes.replicas
        tokens = torch.randint(
            0, VOCABULARY, (ROWS,), generator=torch.Generator().manual_seed(step)
        )
        replica, _ = replica_of(self.strategy)
        local = tokens[replica * rows : (replica + 1) * rows]
        # the last stage has the loss
        bad_rank = BAD_RANK if self.world.axes.pipeline == 1 else self.world.size - 1
        is_bad = bad is not None and self.world.rank == bad_rank

        def micro_step(number, module):
            with self.precision.autocast():
                logits = module(local).float()
            if is_bad and bad == "gradient":
                logits.register_hook(lambda gradient: torch.full_like(gradient, value))
            loss = (
                functional.cross_entropy(logits, (local * 7 + 1) % VOCABULARY, reduction="sum")
                / ROWS
            )
            losses.append(float(loss.detach()))
            return self.precision.scale(loss * value if is_bad and bad == "loss" else loss)

        losses = []
        self.strategy.forward_backward(micro_step, 1)
        self.losses.append(self.world.sum(sum(losses) if reports_loss(self.strategy) else 0.0)[0])
        unscale_grads(self.strategy)
        norm = self.strategy.clip_grad_norm(self.config.train_args.max_grad_norm)
        local_finite = local_grad_finite(self.strategy)
        checked_norm = None if self.strategy.handles_overflow else norm
        made = self.strategy.optimizer_step(
            lambda optimizer: self.precision.step(optimizer, UpdateDecision(checked_norm))
        )
        if self.strategy.handles_overflow:
            self.precision.update_scale(made)
        is_finite = None if local_finite is None else bool(local_finite.isfinite())
        return made, is_finite, bool(norm.isfinite())

    def state(self):
        """Return everything of this rank that the next steps depend on, without step counters."""
        counters = ("compression/step", "local/steps")
        state = {
            shard.name: shard.tensor
            for shard in copied(state_shards(self.strategy))
            if shard.name not in counters
        }
        for name, tensor in self.strategy.replicated_tensors():
            state[f"replicated {name}"] = tensor.detach().clone()
        return state


def differences(ours, theirs):
    assert ours.keys() == theirs.keys()
    return [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]


def skips(world, arguments, kind, value):
    """Return (what a bad step changed, what differs from a run without that step, what the bad step
    returned) on this rank."""
    with_bad, without = Run(world, **arguments), Run(world, **arguments)
    for step in range(2):
        assert with_bad.step(step)[0]
        assert without.step(step)[0]
    before = with_bad.state()
    outcome = with_bad.step(2, kind, value)
    changed = differences(before, with_bad.state())
    for step in range(3, 5):
        assert with_bad.step(step)[0]
        assert without.step(step)[0]
    differing = differences(with_bad.state(), without.state())
    world.barrier()
    return changed, differing, outcome


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
#: Modes in which the local gradient shows whose it was.
KNOWN = (
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


#: One of each kind; `make soak` has the rest.
QUICK = ("ddp", "zero1", "zero3", "deepspeed 2", "pipeline", "topk")


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in CASES],
)
@pytest.mark.parametrize(("kind", "value"), [("loss", float("nan")), ("gradient", float("inf"))])
def test_a_skipped_step_leaves_nothing_behind(name, kind, value):
    world_size, arguments = CASES[name]
    results = run_ranks(skips, world_size, arguments, kind, value)
    for rank, (changed, differing, (made, local_is_finite, norm_is_finite)) in enumerate(results):
        assert not made
        assert changed == []
        # The votes of zero elements depend on the number of the step, and a skipped step counts.
        assert differing == [] or name == "signsgd"
        if name in KNOWN:
            assert local_is_finite == (rank != BAD_RANK)
        if "deepspeed" not in name:
            assert not norm_is_finite


def skip_with_few_elements(world):
    """`randomk` draws few elements: a NaN that is not among them must not stay in the residual."""
    run = Run(world, "ddp", compression={"method": "randomk", "ratio": 0.01}, optim="sgd", net=Net)
    run.step(0)
    before = run.state()

    def micro_step(number, module):
        if world.rank == BAD_RANK:
            module.scale.register_hook(lambda gradient: gradient * float("nan"))
        return sum(each.square().sum() for each in module.parameters() if each.requires_grad)

    run.strategy.forward_backward(micro_step, 1)
    norm = run.strategy.clip_grad_norm(0.5)
    made = run.strategy.optimizer_step(
        lambda optimizer: run.precision.step(optimizer, UpdateDecision(norm))
    )
    return made, differences(before, run.state())


def test_error_feedback_does_not_hide_it():
    assert run_ranks(skip_with_few_elements, 2) == [(False, [])] * 2


def skip_in_a_worker(world):
    run = Run(world, "local_sgd", local_sgd={"sync_every": 4}, net=Plain)
    updates, finite = [], []
    for step in range(8):
        before = {name: each.detach().clone() for name, each in run.strategy.trained.items()}
        updates.append(run.step(step, "loss" if step in (1, 2) else None)[0])
        changed = differences(before, run.strategy.trained)
        assert bool(changed) == updates[-1]
        finite.append(all(bool(each.isfinite().all()) for each in run.strategy.trained.values()))
    return updates, all(finite), run.strategy.is_synchronized, dict(run.strategy.trained)


def test_a_worker_of_local_sgd_skips_only_its_step():
    (first, *_, ours), (second, finite, synchronized, theirs) = run_ranks(skip_in_a_worker, 2)
    assert first == [True] * 8
    assert second == [True, False, False, *[True] * 5]
    assert finite
    assert synchronized
    assert differences(ours, theirs) == []


@pytest.mark.parametrize("optim", ["adamw", "adam"])
def test_a_fused_optimizer_skips_a_step_on_the_device(optim):
    """The flag is read on the device; here on the CPU."""
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
