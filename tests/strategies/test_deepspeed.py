"""`deepspeed` on real ranks: all stages match `single`, exchange state with it, and have the
predicted memory and traffic."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from raised import raises_error
from ranks import run_ranks
from states import assemble, copy_shards
from torch import nn

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.collective_bytes import scatter_bytes
from paceline.distributed.communicator import Communicator
from paceline.distributed.environment import RankEnv
from paceline.distributed.mesh import ParallelDims
from paceline.health.anomalies import UpdateDecision
from paceline.models.shape.outline import outline
from paceline.parallel.cost import Workload
from paceline.parallel.registry import check_strategy, estimate_cost
from paceline.parallel.save_load import load_state, memory_bytes
from paceline.strategies.ddp.strategy import SingleDeviceStrategy
from paceline.strategies.deepspeed.strategy import DeepSpeedStrategy
from paceline.train.optimizers.build import build_optimizer, matrices_of
from paceline.train.precision import Precision

MICRO_BATCHES = 6  # of a global step, over all ranks


class Net(nn.Module):
    """A model with a tied weight, a layer that is used twice, a frozen layer, one without gradient,
    odd sizes and buffers."""

    def __init__(self, statistics=False):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.wide = nn.Linear(16, 33)
        self.frozen = nn.Linear(33, 33).requires_grad_(False)
        self.never = nn.Linear(3, 3)
        self.back = nn.Linear(33, 16)
        self.twice = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16) if statistics else nn.LayerNorm(16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([0.5, 2.0, 1.0]))
        self.register_buffer("seen", torch.tensor(7))

    def forward(self, tokens):
        hidden = self.back(torch.relu(self.frozen(self.wide(self.embed(tokens).mean(1)))))
        return self.head(self.norm(self.twice(torch.tanh(self.twice(hidden)))))


class Run:
    """A strategy with a small model, called in the order of the training loop."""

    def __init__(self, world, stage, bf16=False, statistics=False, **parallel):
        self.world = world
        self.config = Config(
            model="m",
            dataset="d",
            parallel={"mode": "deepspeed", "deepspeed_stage": stage or 1, **parallel},
            train_args={
                "precision": "bf16-mixed" if bf16 else "32",
                "weight_decay": 0.1,
                "gradient_accumulation_steps": MICRO_BATCHES // world.size,
            },
        )
        torch.manual_seed(world.rank)  # `setup` must replace these weights by those of rank 0
        model = Net(statistics)
        self.shape, matrices = outline(model, self.config), matrices_of(model)
        args = self.config.train_args
        self.strategy = (DeepSpeedStrategy if stage else SingleDeviceStrategy)(self.config, world)
        self.precision = Precision(args, world)
        self.model = self.strategy.setup(model)
        self.optimizer = self.strategy.setup_optimizer(
            lambda named: build_optimizer(args, 1e-2, named, matrices)
        )

    def train(self, first, last):
        """Return the loss and the gradient norm of each step."""
        results = []
        count = MICRO_BATCHES // self.world.size
        for step in range(first, last):
            seen = torch.zeros(())

            def micro_step(number, module, step=step, seen=seen):
                generator = torch.Generator().manual_seed(
                    100 * step + self.world.rank * count + number
                )
                tokens = torch.randint(0, 50, (4, 5), generator=generator)
                with self.precision.autocast():
                    loss = nn.functional.cross_entropy(
                        module(tokens).float(), tokens[:, 0], reduction="sum"
                    )
                seen.add_(loss.detach())
                return loss / (4 * MICRO_BATCHES)

            for group in self.optimizer.param_groups:
                group["lr"] = 1e-2 * (1 + step % 3)
            self.strategy.forward_backward(micro_step, count)
            norm = self.strategy.clip_grad_norm(0.5)
            decision = UpdateDecision(None)
            assert self.strategy.optimizer_step(partial(self.precision.step, decision=decision))
            results.append((self.world.sum(float(seen))[0] / (4 * MICRO_BATCHES), float(norm)))
        return results

    def gather_state(self):
        return assemble(self.world.gather_objects(copy_shards(self.strategy.state_shards())))

    def evaluate_loss(self):
        tokens = torch.arange(20).view(4, 5)

        def run(module):
            with torch.no_grad():
                return {"loss": module(tokens).float().square().sum()}

        return float(self.strategy.evaluate(run, self.model)["loss"])

    def measure_traffic(self):
        """Run another step and return the bytes that it sends, by collective."""
        before = dict(self.world.traffic.bytes_by_collective)
        self.train(20, 21)
        after = self.world.traffic.bytes_by_collective
        return {name: size - before.get(name, 0) for name, size in after.items()}


def train_single(world):
    run = Run(world, 0)
    losses = run.train(0, 5)
    middle = run.gather_state().full
    losses += run.train(5, 10)
    return losses, middle, run.gather_state().full


@pytest.fixture(scope="module")
def single():
    return run_ranks(train_single, 1)[0]


def train_resume_and_measure(world, stage, middle):
    """Train, save, resume and measure in one start of DeepSpeed; then train in bf16."""
    run = Run(world, stage)
    losses = run.train(0, 5)
    source = run.gather_state()
    losses += run.train(5, 7)
    evaluated = run.evaluate_loss(), run.model.training
    losses += run.train(7, 10)
    last = run.gather_state().full

    load_state(run.strategy, source)  # back to step 5, replacing the later state
    resumed = run.train(5, 10)
    resumed_last = run.gather_state().full
    run_from_single = Run(world, stage)
    source.full.update(middle)  # the state that `single` wrote
    load_state(run_from_single.strategy, source)
    resumed_from_single = run_from_single.train(5, 10)

    work = Workload(MICRO_BATCHES // world.size)
    costs = []
    for bf16 in (False, True):
        run = run if not bf16 else Run(world, stage, bf16=True)
        bf16_losses = run.train(0, 4) if bf16 else []
        cost = estimate_cost(
            "deepspeed", run.shape, ParallelDims(data=world.size), work, run.config
        )
        costs.append((memory_bytes(run.strategy), cost, run.measure_traffic(), bf16_losses))
    dtypes = {str(value.dtype) for value in run.gather_state().full.values()}
    world.barrier()
    return {
        "losses": losses, "resumed": resumed, "resumed_from_single": resumed_from_single,
        "last": last, "resumed_last": resumed_last, "evaluated": evaluated, "costs": costs,
        "dtypes": dtypes,
    }  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize(("stage", "world_size"), [(1, 2), (2, 3), (3, 2)])
def test_stages_match_single_in_losses_state_and_predicted_cost(single, stage, world_size):
    reference, middle, last = single
    results = run_ranks(train_resume_and_measure, world_size, stage, middle, timeout_s=240.0)
    first = results[0]
    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(first["losses"], reference, **close)
    assert all(result["losses"] == first["losses"] for result in results)
    assert reference[-1][0] < reference[0][0]
    assert all(result["evaluated"] == first["evaluated"] for result in results)

    assert first["last"].keys() == last.keys()
    for name, value in last.items():
        assert first["last"][name].dtype == value.dtype, name
        torch.testing.assert_close(first["last"][name], value, rtol=1e-4, atol=2e-5, msg=name)
        assert torch.equal(first["last"][name], first["resumed_last"][name]), name
    assert first["resumed"] == first["losses"][5:]
    torch.testing.assert_close(first["resumed_from_single"], reference[5:], **close)

    largest_state_rank = max(range(world_size), key=lambda rank: results[rank]["costs"][0][0])
    for number in (0, 1):  # float32, bf16
        state_bytes, cost, sent, bf16_losses = results[largest_state_rank]["costs"][number]
        assert state_bytes == pytest.approx(cost.state, rel=0.02)
        # Stage 3 gathers a module once for each call, in forward and in backward. The model's shape
        # does not include that `twice`, of 272 elements, is called twice.
        repeated_gather_bytes = (
            2
            * MICRO_BATCHES
            // world_size
            * scatter_bytes(272 * (2 if bf16_losses else 4), world_size)
            if stage == 3
            else 0
        )
        assert sum(sent.values()) == pytest.approx(
            cost.traffic_per_step + repeated_gather_bytes, rel=0.02
        )
        if bf16_losses:
            torch.testing.assert_close(
                [loss for loss, _ in bf16_losses],
                [loss for loss, _ in reference[:4]],
                rtol=0.02,
                atol=0,
            )
    # master weights, and an integer buffer
    assert first["dtypes"] == {"torch.float32", "torch.int64"}


def train_with_redirected_output(world, folder):
    """Train with file descriptors 1 and 2 redirected to a file, since libraries may write to them
    without Python's streams."""
    os.dup2(os.open(os.path.join(folder, f"output-{world.rank}"), os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(1, 2)
    os.environ["HOME"] = folder
    run = Run(world, 2, statistics=True)
    run.train(0, 2)
    world.barrier()
    return run.model.norm.running_mean, run.model.norm.num_batches_tracked


@pytest.mark.soak
def test_prints_nothing_leaves_no_file_and_shares_running_statistics(tmp_path):
    first, second = run_ranks(train_with_redirected_output, 2, str(tmp_path), timeout_s=240.0)
    assert torch.equal(first[0], second[0])
    assert first[0].any()
    assert (first[1], second[1]) == (6, 6)
    files = {
        path.relative_to(tmp_path).as_posix(): path.read_text()
        for path in tmp_path.rglob("*")
        if path.is_file()
    }
    assert files == {"output-0": "", "output-1": ""}


def error_message_of(code, *paths):
    """Return the message of the ConfigError that ``code`` raises in a new interpreter, in which
    ``paths`` precede all other import paths."""
    code = (
        f"from paceline.core.errors import ConfigError\ntry:\n    {code}\nexcept ConfigError as"
        " error:\n    print(error)\n"
    )
    python_path = os.pathsep.join([*paths, *(path for path in sys.path if path)])
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": python_path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return process.stdout + process.stderr


@pytest.mark.soak
def test_missing_package_error_has_the_install_command(tmp_path):
    # a folder of the same name on the import path, such as one with DeepSpeed's configs
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Without:\n"
        "    def __init__(self, finder): self.finder = finder\n"
        "    def __getattr__(self, name): return getattr(self.finder, name)\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        spec = self.finder.find_spec(name, path, target)\n"
        "        return None if name == 'deepspeed' and spec and spec.origin else spec\n"
        "sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]\n"
    )
    check = (
        "from paceline.config.schema import Config; from paceline.parallel.registry import"
        " check_strategy; "
    )
    check += (
        "from paceline.distributed.mesh import ParallelDims; config = Config(model='m',"
        " dataset='d', parallel={'deepspeed_stage': 3}); "
    )
    check += "check_strategy('deepspeed', config, ParallelDims(data=2))"
    message = error_message_of(check, str(tmp_path))
    assert "DeepSpeed is not installed" in message
    assert "pip install 'paceline[deepspeed]'" in message
    assert "`parallel.mode: zero3`" in message


@pytest.mark.soak
def test_import_failure_is_reported_with_its_reason(tmp_path):
    (tmp_path / "deepspeed.py").write_text("raise RuntimeError('no compiler')\n")
    message = error_message_of(
        "from paceline.strategies.deepspeed.package import import_deepspeed as load; load('cpu')",
        str(tmp_path),
    )
    assert "DeepSpeed cannot be imported: RuntimeError: no compiler" in message


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
def test_rejects_running_statistics_in_half_precision(precision):
    world = Communicator(RankEnv(), torch.device("cpu"))
    config = Config(
        model="m", dataset="d", parallel={"mode": "deepspeed"}, train_args={"precision": precision}
    )
    code = "deepspeed-with-running-statistics"
    with raises_error(ConfigError, code=code, naming="parallel.mode"):
        DeepSpeedStrategy(config, world).setup(Net(statistics=True))


@pytest.mark.parametrize(
    ("parallel", "sections", "error"),
    [
        ({}, {"train_args": {"optim": "adafactor"}}, ("not-supported", "train_args.optim")),
        (
            {"deepspeed_stage": 3},
            {"evaluation": {"mode": "rank0"}},
            ("not-supported", "evaluation.mode"),
        ),
        (
            {"cpu_offload": "optimizer", "device": "cpu"},
            {},
            ("offload-on-cpu", "parallel.cpu_offload"),
        ),
        (
            {"cpu_offload": "all", "deepspeed_stage": 1},
            {},
            ("not-supported", "parallel.cpu_offload"),
        ),
    ],
)
def test_rejects_unsupported_settings(parallel, sections, error):
    config = Config(model="m", dataset="d", parallel={"mode": "deepspeed", **parallel}, **sections)
    with raises_error(ConfigError, code=error[0], naming=error[1]):
        check_strategy("deepspeed", config, ParallelDims(data=2))
