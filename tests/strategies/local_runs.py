"""Training loops on real ranks for the tests of `local_sgd` and `diloco`."""

import torch
from states import assemble, copy_shards
from torch import nn
from torch.nn import functional

from paceline.config.schema import Config
from paceline.models.shape.outline import outline
from paceline.parallel.save_load import load_state
from paceline.parallel.strategy import make_strategy
from paceline.train.optimizers.build import build_optimizer, matrices_of

VOCAB = 24
ROWS = 24  # of a global batch; divisible into two micro-batches on 2, 3 and 4 ranks


class Small(nn.Module):
    """A model with a scalar, a frozen layer and running statistics besides plain layers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 10)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Linear(10, 10).requires_grad_(False)
        self.norm = nn.BatchNorm1d(10)
        self.inner = nn.Linear(10, 13)
        self.head = nn.Linear(13, VOCAB)

    def forward(self, tokens):
        embedded = self.embedding(tokens)
        x = self.norm(embedded * self.scale) + self.frozen(embedded)
        return self.head(torch.tanh(self.inner(x)))


class Plain(nn.Sequential):
    """A plain chain, wide enough that the bytes of step counts and padding are negligible."""

    def __init__(self):
        super().__init__(
            nn.Embedding(VOCAB, 64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, VOCAB)
        )


def make_config(mode, local=None, optim="adamw", clip=0.5, **train_args):
    return Config(
        model="m",
        dataset="d",
        parallel={"mode": mode, "bucket_cap_mb": 0.002},
        local_sgd=local or {},
        train_args={"weight_decay": 0.1, "optim": optim, "max_grad_norm": clip, **train_args},
    )


def set_up_strategy(
    world, mode, local=None, optim="adamw", net=Small, clip=0.5, learning_rate=1e-2
):
    """Return a strategy after setup, with its optimizer and the model's ``shape``."""
    config = make_config(mode, local, optim, clip)
    strategy = make_strategy(mode, config, world)
    torch.manual_seed(world.rank)  # `setup` must replace these weights by those of rank 0
    model_to_train = net()
    strategy.shape, matrices = outline(model_to_train, config), matrices_of(model_to_train)
    model = strategy.setup(model_to_train)
    strategy.setup_optimizer(
        lambda named: build_optimizer(config.train_args, learning_rate, named, matrices)
    )
    model.train()
    return strategy


def make_tokens(step):
    return torch.randint(0, VOCAB, (ROWS,), generator=torch.Generator().manual_seed(step))


def compute_loss(module, tokens):
    """Return the sum of the loss over the tokens."""
    return functional.cross_entropy(module(tokens), (tokens * 7 + 1) % VOCAB, reduction="sum")


def train_step(strategy, step, micro_batches=2):
    """Run a step on this rank's share of a global batch. Return the mean loss of the batch."""
    tokens, losses = make_tokens(step), []
    rows = ROWS // (strategy.world.size * micro_batches)

    def micro_step(number, module):
        begin = (strategy.replica * micro_batches + number) * rows
        loss = compute_loss(module, tokens[begin : begin + rows])
        losses.append(float(loss.detach()))
        return loss / ROWS

    strategy.forward_backward(micro_step, micro_batches)
    strategy.clip_grad_norm(strategy.config.train_args.max_grad_norm)
    assert strategy.optimizer_step(lambda optimizer: (optimizer.step(), True)[1])
    return strategy.world.sum(sum(losses))[0] / ROWS


def flat_weights(strategy):
    """Return this rank's trained parameters as one vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in strategy.trained.values()])


def full_state(strategy):
    """Return all state of this rank that the next steps depend on."""
    state = {
        f"model/{name}": tensor.detach().clone()
        for name, tensor in strategy.model.state_dict().items()
    }
    for shard in strategy.tensor_shards():
        for key, value in strategy.optimizer_entries(shard).items():
            state[f"optimizer/{shard.name}/{key}"] = value.clone()
    for name, ranges in strategy.outer_state().items():
        state |= {f"{name}/{start}": tensor.clone() for start, tensor in ranges}
    return state


def gather_checkpoint(strategy):
    """Return the assembled state of all ranks, as each of them would read it from a checkpoint."""
    world = strategy.world
    return assemble(world.gather_objects(copy_shards(strategy.state_shards())))


def resume_differences(world, mode, local, save_at, steps):
    """Return the names of the tensors that differ on this rank between an uninterrupted run and
    runs that resume from a checkpoint of each step of ``save_at``. The uninterrupted run saves no
    checkpoint, so this also shows that saving one does not change a run."""
    uninterrupted = set_up_strategy(world, mode, local)
    for step in range(steps):
        train_step(uninterrupted, step)
    expected, differences = full_state(uninterrupted), []
    saving, sources = set_up_strategy(world, mode, local), {}
    for step in range(steps):
        train_step(saving, step)
        if step + 1 in save_at:
            sources[step + 1] = gather_checkpoint(saving)
    for name, run in [
        ("saving", saving),
        *((f"from {at}", resume_strategy(world, mode, local, sources[at])) for at in save_at),
    ]:
        for step in range(run.steps_done, steps):
            train_step(run, step)
        state = full_state(run)
        assert state.keys() == expected.keys()
        differences += [
            f"{name}: {key}"
            for key, value in state.items()
            if not torch.equal(value, expected[key])
        ]
        assert all(text.startswith(mode) for _, text in run.notices), run.notices
    return differences


def resume_strategy(world, mode, local, source):
    strategy = set_up_strategy(world, mode, local)
    load_state(strategy, source)
    return strategy
