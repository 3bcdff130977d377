"""A dataset that loader processes can import, and a script that loads it and waits to be killed."""

import os
import sys

import torch
from torch import nn

from paceline.data.loader import train_steps
from paceline.data.loader_process import LoaderOptions
from paceline.data.order.samples import SampleOrder

#: Read when the module is imported, as user code does.
RANK = int(os.environ.get("LOADER_TEST_RANK", 0))


class Places:
    """A dataset whose samples are the process that reads them, the process's parent, and a variable
    of the environment."""

    deterministic = True

    def __len__(self):
        return 64

    def __getitem__(self, index):
        assert not torch.cuda.is_initialized()
        return torch.tensor([index, os.getpid(), os.getppid(), RANK])


class WithModule(Places):
    def __init__(self):
        self.module = nn.Linear(2, 2)


class WithNumbers(Places):
    """A dataset that holds ``size_bytes`` in memory."""

    def __init__(self, size_bytes, as_tensor):
        numbers = torch.zeros(size_bytes, dtype=torch.uint8)
        self.numbers = numbers if as_tensor else numbers.numpy()


def stack(samples):
    return torch.stack(list(samples))


def load_places():
    """Yield the batches that a loader process of the fork server has read."""
    steps = train_steps(
        Places(), SampleOrder(64, 4, seed=1), stack, rank=0, world_size=1, accumulation=1,
        first_step=0, last_step=16,
        options=LoaderOptions(num_workers=1, start_method="forkserver"),
    )  # fmt: skip
    return (batch.data for [batch] in steps)


if __name__ == "__main__":
    from loader_dataset import load_places

    from paceline.data.loader_process import start_loader_server

    start_loader_server()
    batches = load_places()
    print(*next(batches)[0, 1:3].tolist(), flush=True)
    sys.stdin.read()
