"""Wrap a model in torch's DistributedDataParallel again in the middle of a training, as a resumed
run does, and compare the weights with those of a training without interruption.

Run: torchrun --standalone --nproc-per-node 4 examples/ddp_restart.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()


def train(restart_at=None):
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(300, 300), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    for step in range(8):
        if step == restart_at:
            del ddp
            ddp = DistributedDataParallel(model, bucket_cap_mb=1)
        x = torch.randn(16, 300, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters())


reference = train()
for name, weights in (("the same again", train()), ("wrapped again at step 4", train(4))):
    if rank == 0:
        print(f"{name}: equal bits {torch.equal(weights, reference)}")
dist.destroy_process_group()
