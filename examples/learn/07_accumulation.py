"""Four micro-batches of unequal size on two ranks: which division gives the right gradient?

Run: torchrun --standalone --nproc-per-node 2 examples/learn/07_accumulation.py
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

COUNTS = [[1, 7], [3, 5]]  # samples of each micro-batch of each rank: 16 in total

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
assert size == len(COUNTS), "this program needs a rank for each list of COUNTS"
torch.manual_seed(0)
x = torch.randn(16, 4)
y = x.sum(dim=1, keepdim=True) + torch.randn(16, 1)
model = nn.Linear(4, 1)
squared_error = nn.MSELoss(reduction="sum")

squared_error(model(x), y).div(16).backward()  # the whole batch at once
expected = model.weight.grad.clone()
model.zero_grad()
ddp = DistributedDataParallel(model)
first = sum(sum(counts) for counts in COUNTS[:rank])
xs = x[first : first + sum(COUNTS[rank])].split(COUNTS[rank])
ys = y[first : first + sum(COUNTS[rank])].split(COUNTS[rank])
total = torch.tensor(float(sum(COUNTS[rank])))
dist.all_reduce(total)  # the global count, known before backward

for name in ("mean of means", "global count"):
    ddp.zero_grad()
    for number, (inputs, targets) in enumerate(zip(xs, ys, strict=True)):
        last = number == len(xs) - 1
        with contextlib.nullcontext() if last else ddp.no_sync():
            loss = squared_error(ddp(inputs), targets)
            if name == "mean of means":
                loss = loss / len(inputs) / len(xs)
            else:
                loss = loss / total * size  # DDP divides by the number of ranks
            loss.backward()
    error = (model.weight.grad - expected).norm() / expected.norm()
    if rank == 0:
        values = ", ".join(f"{value:.4f}" for value in model.weight.grad[0])
        print(f"{name:14} {values}   relative error {error:.0e}")
assert error < 1e-6  # of the global count
if rank == 0:
    print(f"{'whole batch':14} {', '.join(f'{value:.4f}' for value in expected[0])}")
dist.destroy_process_group()
