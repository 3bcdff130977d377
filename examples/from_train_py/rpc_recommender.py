"""A click model whose embedding table is on a parameter server, with torch.distributed.rpc.

Process 0 is the trainer, process 1 the server. (Several trainers of such a script update the table
in the order in which their gradients arrive, so their losses vary from run to run.)
"""

import os

import torch
import torch.distributed.autograd as dist_autograd
import torch.multiprocessing as mp
from torch import nn
from torch.distributed import rpc
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.utils.data import DataLoader, TensorDataset


class Users(nn.Embedding):
    def reset_parameters(self):
        nn.init.zeros_(self.weight)


def train():
    generator = torch.Generator().manual_seed(1)
    users = torch.randint(0, 1000, (640,), generator=generator)
    features = torch.randn(640, 8, generator=generator)
    clicks = (features.sum(dim=1) + (users % 7 - 3) > 0).float()
    loader = DataLoader(TensorDataset(users, features, clicks), batch_size=64)

    table = RemoteModule("server", Users, (1000, 16))
    torch.manual_seed(0)
    top = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 1))
    parameters = [*table.remote_parameters(), *(rpc.RRef(weight) for weight in top.parameters())]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.5)
    criterion = nn.BCEWithLogitsLoss()

    for _ in range(2):
        for ids, x, y in loader:
            with dist_autograd.context() as context:
                logits = top(torch.cat([table(ids), x], dim=1)).squeeze(1)
                loss = criterion(logits, y)
                dist_autograd.backward(context, [loss])
                optimizer.step(context)
            print(f"loss {loss.item():.9f}")


def main(rank):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    rpc.init_rpc("trainer" if rank == 0 else "server", rank=rank, world_size=2)
    if rank == 0:
        train()
    rpc.shutdown()  # waits until all processes call it


if __name__ == "__main__":
    mp.spawn(main, nprocs=2)
