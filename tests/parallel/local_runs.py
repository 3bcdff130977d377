"""Training by workers of their own on real ranks: shared by the tests of `local_sgd` and
`diloco`."""

import torch
from states import assemble, copied
from torch import nn
from torch.nn import functional

from paceline.config.schema import Config
from paceline.models.shape.outline import outline
from paceline.parallel.base import make_strategy
from paceline.parallel.protocols import replica_of
from paceline.parallel.save_load import load_state, optimizer_entries, state_shards
from paceline.train.optimizer import build_optimizer, matrices_of

WORDS = 24
ROWS = 24  # of a global batch: two micro-batches on 2, 3 and 4 ranks


class Small(nn.Module):
    """A scalar, a frozen layer and running statistics beside the plain."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 10)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Linear(10, 10).requires_grad_(False)
        self.norm = nn.BatchNorm1d(10)
        self.inner = nn.Linear(10, 13)
        self.head = nn.Linear(13, WORDS)

    def forward(self, words):
        x = self.norm(self.words(words) * self.scale) + self.frozen(self.words(words))
        return self.head(torch.tanh(self.inner(x)))


class Plain(nn.Sequential):
    """Wide enough that step counts and padding do not show."""

    def __init__(self):
        super().__init__(
            nn.Embedding(WORDS, 64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, WORDS)
        )


def config_of(mode, local=None, optim="adamw", clip=0.5, **train_args):
    return Config(
        model="m",
        dataset="d",
        parallel={"mode": mode, "bucket_cap_mb": 0.002},
        local_sgd=local or {},
        train_args={"weight_decay": 0.1, "optim": optim, "max_grad_norm": clip, **train_args},
    )


def make(world, mode, local=None, optim="adamw", net=Small, clip=0.5, rate=1e-2):
    """A strategy, placed, with its optimizer; ``shape`` beside it."""
    config = config_of(mode, local, optim, clip)
    strategy = make_strategy(mode, config, world)
    torch.manual_seed(world.rank)  # rank 0's weights must win
    built = net()
    strategy.shape, matrices = outline(built, config), matrices_of(built)
    model = strategy.setup(built)
    strategy.setup_optimizer(
        lambda named: build_optimizer(config.train_args, rate, named, matrices)
    )
    model.train()
    return strategy


def words_of(step):
    return torch.randint(0, WORDS, (ROWS,), generator=torch.Generator().manual_seed(step))


def loss_of(module, words):
    """Sum over the words."""
    return functional.cross_entropy(module(words), (words * 7 + 1) % WORDS, reduction="sum")


def one_step(strategy, step, micro_batches=2):
    """A step on this rank's share of a global batch. Returns the mean loss over the whole of it."""
    words, seen = words_of(step), []
    rows = ROWS // (strategy.world.size * micro_batches)

    def micro_step(number, module):
        begin = (replica_of(strategy)[0] * micro_batches + number) * rows
        loss = loss_of(module, words[begin : begin + rows])
        seen.append(float(loss.detach()))
        return loss / ROWS

    strategy.forward_backward(micro_step, micro_batches)
    strategy.clip_grad_norm(strategy.config.train_args.max_grad_norm)
    assert strategy.optimizer_step(lambda optimizer: (optimizer.step(), True)[1])
    return strategy.world.sum(sum(seen))[0] / ROWS


def weights(strategy):
    """All that this rank trains, as one vector."""
    return torch.cat([one.detach().reshape(-1) for one in strategy.trained.values()])


def everything(strategy):
    """All that the next steps depend on, as this rank has it."""
    found = {
        f"model/{name}": one.detach().clone() for name, one in strategy.model.state_dict().items()
    }
    for part in strategy.tensor_shards():
        found |= {
            f"optimizer/{part.name}/{key}": one.clone()
            for key, one in optimizer_entries(strategy, part).items()
        }
    for name, ranges in strategy.outer_state().items():
        found |= {f"{name}/{start}": one.clone() for start, one in ranges}
    return found


def source_of(strategy):
    """A checkpoint of all ranks, as each of them would read it."""
    world = strategy.world
    return assemble(world.gather_objects(copied(state_shards(strategy))))


def goes_on_to_the_bit(world, mode, local, save_at, steps):
    """Names of what differs on this rank between an unbroken run and those that go on from a
    checkpoint of each step of ``save_at``. A checkpoint leaves the run that wrote it as it was: the
    unbroken one is without any."""
    plain = make(world, mode, local)
    for step in range(steps):
        one_step(plain, step)
    expected, wrong = everything(plain), []
    saving, sources = make(world, mode, local), {}
    for step in range(steps):
        one_step(saving, step)
        if step + 1 in save_at:
            sources[step + 1] = source_of(saving)
    for name, run in [
        ("saving", saving),
        *((f"from {at}", resumed(world, mode, local, sources[at])) for at in save_at),
    ]:
        for step in range(run.done, steps):
            one_step(run, step)
        found = everything(run)
        assert found.keys() == expected.keys()
        wrong += [
            f"{name}: {key}" for key, one in found.items() if not torch.equal(one, expected[key])
        ]
        assert all(text.startswith(mode) for _, text in run.notices), run.notices
    return wrong


def resumed(world, mode, local, source, **more):
    strategy = make(world, mode, local, **more)
    load_state(strategy, source)
    return strategy
