"""A gradient that is not finite: the update is skipped on all ranks, and it is as if the step had
never been."""

import pytest
import torch
from ranks import run_ranks
from states import copied
from torch.nn import functional
from training import ROWS, WORDS, Net, Plain

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
    """A strategy that trains a small model; at some steps a rank's loss, or one gradient alone, is
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
        """Whether the update was made, and whether this rank's own gradient was finite (None: not
        known). ``bad``: None, "loss", or "gradient": of one parameter alone, and of no other."""
        rows = ROWS // self.world.axes.replicas
        words = torch.randint(0, WORDS, (ROWS,), generator=torch.Generator().manual_seed(step))
        mine = words[
            replica_of(self.strategy)[0] * rows : (replica_of(self.strategy)[0] + 1) * rows
        ]
        # the last stage has the loss
        bad_rank = BAD_RANK if self.world.axes.pipeline == 1 else self.world.size - 1
        mine_is_bad = bad is not None and self.world.rank == bad_rank

        def micro_step(number, module):
            with self.precision.autocast():
                logits = module(mine).float()
            if mine_is_bad and bad == "gradient":
                logits.register_hook(lambda gradient: torch.full_like(gradient, value))
            loss = functional.cross_entropy(logits, (mine * 7 + 1) % WORDS, reduction="sum") / ROWS
            seen.append(float(loss.detach()))
            return self.precision.scale(loss * value if mine_is_bad and bad == "loss" else loss)

        seen = []
        self.strategy.forward_backward(micro_step, 1)
        self.losses.append(self.world.sum(sum(seen) if reports_loss(self.strategy) else 0.0)[0])
        unscale_grads(self.strategy)
        norm = self.strategy.clip_grad_norm(self.config.train_args.max_grad_norm)
        own = local_grad_finite(self.strategy)
        norm_seen = None if self.strategy.handles_overflow else norm
        made = self.strategy.optimizer_step(
            lambda optimizer: self.precision.step(optimizer, UpdateDecision(norm_seen))
        )
        if self.strategy.handles_overflow:
            self.precision.update_scale(made)
        return made, None if own is None else bool(own.isfinite()), bool(norm.isfinite())

    def state(self):
        """All that this rank holds and the next steps depend on; a counter of steps goes on."""
        counters = ("compression/step", "local/steps")
        found = {
            one.name: one.tensor
            for one in copied(state_shards(self.strategy))
            if one.name not in counters
        }
        return found | {
            f"held {name}": one.detach().clone() for name, one in self.strategy.replicated_tensors()
        }


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    return [name for name, one in ours.items() if not torch.equal(one, theirs[name])]


def skips(world, arguments, kind, value):
    """(what a bad step changed, what differs from a run without that step, verdicts of the bad
    step) on this rank."""
    with_bad, without = Run(world, **arguments), Run(world, **arguments)
    for step in range(2):
        assert with_bad.step(step)[0]
        assert without.step(step)[0]
    before = with_bad.state()
    verdict = with_bad.step(2, kind, value)
    changed = same(before, with_bad.state())
    for step in range(3, 5):
        assert with_bad.step(step)[0]
        assert without.step(step)[0]
    found = changed, same(with_bad.state(), without.state()), verdict
    world.barrier()
    return found


LINE = {"net": Net}
CASES = {
    "ddp": (3, {"mode": "ddp", **LINE}),
    "ddp without clipping": (2, {"mode": "ddp", "clip": 0.0, **LINE}),
    "ddp with sgd": (2, {"mode": "ddp", "optim": "sgd", **LINE}),
    "ddp over a ring of our own": (
        3,
        {"mode": "ddp", "parallel": {"all_reduce_algorithm": "ring"}, **LINE},
    ),
    "zero1": (3, {"mode": "zero1", **LINE}),
    "zero2": (2, {"mode": "zero2", **LINE}),
    "zero3": (2, {"mode": "zero3", **LINE}),
    "hybrid sharding": (4, {"mode": "zero3", "axes": ParallelDims(data=2, shard=2), **LINE}),
    "deepspeed 1": (2, {"mode": "deepspeed", "parallel": {"deepspeed_stage": 1}}),
    "deepspeed 2": (2, {"mode": "deepspeed", "parallel": {"deepspeed_stage": 2}}),
    "deepspeed 3": (2, {"mode": "deepspeed", "parallel": {"deepspeed_stage": 3}}),
    "pipeline": (2, {"mode": "pipeline", "axes": ParallelDims(pipeline=2)}),
    "replicas of a pipeline": (4, {"mode": "pipeline", "axes": ParallelDims(data=2, pipeline=2)}),
    "topk": (2, {"mode": "ddp", "compression": {"method": "topk", "ratio": 0.1}, **LINE}),
    "topk with sgd": (
        2,
        {"mode": "ddp", "compression": {"method": "topk", "ratio": 0.1}, "optim": "sgd", **LINE},
    ),
    "powersgd": (2, {"mode": "ddp", "compression": {"method": "powersgd", "rank": 2}, **LINE}),
    "signsgd": (2, {"mode": "ddp", "compression": {"method": "signsgd"}, "optim": "sgd", **LINE}),
    "bf16 messages": (2, {"mode": "ddp", "compression": {"method": "bf16"}, **LINE}),
}
#: The rank whose gradient it was is known by the gradient itself.
KNOWN = (
    "ddp",
    "ddp without clipping",
    "ddp with sgd",
    "ddp over a ring of our own",
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
    found = run_ranks(skips, world_size, arguments, kind, value)
    for rank, (changed, differing, (made, own_is_finite, norm_is_finite)) in enumerate(found):
        assert not made
        assert changed == []
        # Signs of what is zero depend on the number of the step; a step that is passed over is
        # counted.
        assert differing == [] or name == "signsgd"
        if name in KNOWN:
            assert own_is_finite == (rank != BAD_RANK)
        if "deepspeed" not in name:
            assert not norm_is_finite


def an_element_that_is_not_sent(world):
    """`randomk` draws few elements: a NaN that is not among them must not wait in the residual."""
    run = Run(world, "ddp", compression={"method": "randomk", "ratio": 0.01}, optim="sgd", net=Net)
    run.step(0)
    before = run.state()

    def micro_step(number, module):
        loss = sum(one.square().sum() for one in module.parameters() if one.requires_grad)
        (
            module.scale.register_hook(lambda gradient: gradient * float("nan"))
            if world.rank == BAD_RANK
            else None
        )
        return loss

    run.strategy.forward_backward(micro_step, 1)
    norm = run.strategy.clip_grad_norm(0.5)
    made = run.strategy.optimizer_step(
        lambda optimizer: run.precision.step(optimizer, UpdateDecision(norm))
    )
    return made, same(before, run.state())


def test_error_feedback_does_not_swallow_it():
    assert run_ranks(an_element_that_is_not_sent, 2) == [(False, [])] * 2


def one_worker_skips(world):
    run = Run(world, "local_sgd", local_sgd={"sync_every": 4}, net=Plain)
    verdicts, finite = [], []
    for step in range(8):
        before = {name: one.detach().clone() for name, one in run.strategy.trained.items()}
        verdicts.append(run.step(step, "loss" if step in (1, 2) else None)[0])
        changed = same(before, run.strategy.trained)
        assert bool(changed) == verdicts[-1]
        finite.append(all(bool(one.isfinite().all()) for one in run.strategy.trained.values()))
    return verdicts, all(finite), run.strategy.is_synchronized, dict(run.strategy.trained)


def test_a_worker_that_trains_on_its_own_skips_its_own_step():
    (first, *_, mine), (second, finite, together, theirs) = run_ranks(one_worker_skips, 2)
    assert first == [True] * 8
    assert second == [True, False, False, *[True] * 5]
    assert finite
    assert together
    assert all(torch.equal(one, theirs[name]) for name, one in mine.items())


@pytest.mark.parametrize("optim", ["adamw", "adam"])
def test_an_accelerators_optimizer_can_leave_a_step_out_by_itself(optim):
    """The flag that is read on the device: as fused optimizers take it, here on the CPU."""
    from paceline.distributed.environment import RankEnv
    from paceline.health.anomalies import skips_on_device

    config = Config(model="m", dataset="d", train_args={"optim": optim})
    model = Plain()
    named = [(name, one) for name, one in model.named_parameters()]
    optimizer = build_optimizer(config.train_args, 1e-2, named, matrices_of(model))
    precision = Precision(config.train_args, Communicator(RankEnv(), torch.device("cpu")))
    assert skips_on_device(optimizer, torch.tensor(1.0))

    def state():
        kept = [value for entries in optimizer.state.values() for value in entries.values()]
        return [one.detach().clone() for one in (*model.parameters(), *kept)]

    for value in (1.0, float("nan"), float("inf")):
        for _, one in named:
            one.grad = torch.full_like(one, value)
        before = state()
        assert precision.step(optimizer, UpdateDecision(torch.tensor(value), on_device=True))
        unchanged = len(before) == len(state()) and all(
            torch.equal(a, b) for a, b in zip(before, state(), strict=True)
        )
        assert unchanged == (value != 1.0)
    assert not hasattr(optimizer, "found_inf")
