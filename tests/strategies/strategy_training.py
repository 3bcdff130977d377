"""Small models, among them one with tied, frozen and unused weights, and a training loop around a
strategy, for the tests of strategies."""

import torch
from states import copy_shards
from torch import nn
from torch.nn import functional

from paceline.config.schema import Config
from paceline.distributed.communicator import Communicator
from paceline.models.shape.outline import outline
from paceline.parallel.cost import Workload
from paceline.parallel.registry import estimate_cost
from paceline.parallel.save_load import load_state, memory_bytes
from paceline.parallel.strategy import make_strategy
from paceline.train.optimizers.build import build_optimizer, matrices_of

WIDTH = 20  # not divisible by three, so that shards have padding
VOCABULARY = 30
ROWS = 24


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A model with tied weights, a frozen layer, a scalar, layers that few or no samples reach, and
    running statistics. With ``twice``, the first block runs twice."""

    def __init__(self, twice=True):
        super().__init__()
        self.twice = twice
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.statistics = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.rare = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(3, 5)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in [*self.blocks, self.blocks[0]] if self.twice else self.blocks:
            x = block(x)
        x = self.statistics(self.frozen(x)) * self.scale
        rare = tokens < 2
        if rare.any():
            x = x + rare[:, None] * self.rare(x)
        return self.head(x)


class Adapted(nn.Module):
    """Frozen matrices with low-rank adapters, as in LoRA."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(48, 48).requires_grad_(False)
            self.low_a = nn.Linear(48, 2, bias=False)
            self.low_b = nn.Linear(2, 48, bias=False)

        def forward(self, x):
            return x + torch.tanh(self.base(x) + self.low_b(self.low_a(x)))

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 48).requires_grad_(False)
        self.blocks = nn.ModuleList(Adapted.Layer() for _ in range(3))
        self.head = nn.Linear(48, VOCABULARY, bias=False).requires_grad_(False)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Plain(nn.Sequential):
    """A plain chain, wide enough that the bytes of step counts and scalars are negligible."""

    def __init__(self):
        blocks = [layer for _ in range(2) for layer in (nn.Linear(64, 64), nn.Tanh())]
        super().__init__(nn.Embedding(VOCABULARY, 64), *blocks, nn.Linear(64, VOCABULARY))


def train(
    world,
    mode,
    axes=None,
    steps=6,
    net=Net,
    source=None,
    first_step=0,
    bf16=False,
    micro_batches=2,
    train_mode=False,
    learning_rate=3e-3,
    reduce_dtype="float32",
):
    """Train for ``steps`` steps of AdamW with weight decay, clipping and accumulation. The initial
    weights differ between ranks, so that only a strategy that takes those of rank 0 passes.

    Returns:
        Among others the losses of the global batch, the tensor shards that this rank writes, the
        state in bytes, the estimated cost, and the bytes sent in the last step.
    """
    if axes is not None:
        world = Communicator(world.env, world.device, axes)
    config = Config(
        model="m",
        dataset="d",
        parallel={"mode": mode, "bucket_cap_mb": 0.004, "reduce_dtype": reduce_dtype},
        train_args={
            "weight_decay": 0.1,
            "precision": "bf16-mixed" if bf16 else "32",
            "gradient_accumulation_steps": micro_batches,
        },
    )
    strategy = make_strategy(mode, config, world)
    torch.manual_seed(world.rank)
    built = net().train(train_mode)
    shape, matrices = outline(built, config), matrices_of(built)
    model = strategy.setup(built)
    strategy.setup_optimizer(
        lambda named: build_optimizer(config.train_args, learning_rate, named, matrices)
    )
    if source is not None:
        load_state(strategy, source)
    losses, norms, traffic = [], [], {}
    rows = ROWS // (world.axes.replicas * micro_batches)
    for step in range(first_step, first_step + steps):
        tokens = torch.randint(
            0, VOCABULARY, (ROWS,), generator=torch.Generator().manual_seed(step)
        )
        seen = []

        def micro_step(number, module, tokens=tokens, seen=seen):
            begin = (strategy.replica * micro_batches + number) * rows
            inputs = tokens[begin : begin + rows]
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                logits = module(inputs)
            loss = (
                functional.cross_entropy(
                    logits.float(), (inputs * 7 + 1) % VOCABULARY, reduction="sum"
                )
                / ROWS
            )
            seen.append(float(loss.detach()))
            return loss

        before = dict(world.traffic.bytes_by_collective)
        strategy.forward_backward(micro_step, micro_batches)
        norms.append(float(strategy.clip_grad_norm(0.5)))
        assert strategy.optimizer_step(lambda optimizer: (optimizer.step(), True)[1])
        traffic = {
            name: size - before.get(name, 0)
            for name, size in world.traffic.bytes_by_collective.items()
        }
        losses.append(world.sum(sum(seen))[0])

    def compute_logits(module):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return {"logits": module(torch.arange(VOCABULARY))}

    model.eval()
    shards, state_bytes = copy_shards(strategy.state_shards()), memory_bytes(strategy)
    logits_by_vocabulary = strategy.evaluate(compute_logits, model)["logits"]
    result = {
        "losses": losses,
        "norms": norms,
        "shards": shards,
        "state": state_bytes,
        "state_after_evaluation": memory_bytes(strategy),
        "logits": logits_by_vocabulary,
        "cost": (
            estimate_cost(
                strategy.name, shape, world.axes, Workload(micro_batches=micro_batches), config
            )
        ),
        "traffic": {name: size for name, size in traffic.items() if size},
    }
    world.barrier()
    return result


def largest_difference(ours, theirs):
    """Return the largest relative difference between the trained weights of two states."""
    assert set(ours.full) == set(theirs.full), set(ours.full) ^ set(theirs.full)
    return max(
        float((value - theirs.full[name]).norm() / theirs.full[name].norm().clamp(min=1e-3))
        for name, value in ours.full.items()
        if name.startswith("model/")
    )
