"""Two pipeline stages on two ranks: GPipe with 1, 2, 4 and 8 micro-batches, and the bubble.

Run: torchrun --standalone --nproc-per-node 2 examples/learn/11_pipeline.py
"""

import time

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
assert dist.get_world_size() == 2, "this program needs 2 ranks"
torch.manual_seed(rank)
stage = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))


def step(num_micro_batches):
    """Run forward of all micro-batches, then backward of all. Return the busy and total seconds."""
    busy_s, tape = 0.0, []
    dist.barrier()
    begin = time.perf_counter()
    for x in torch.ones(2048, 512).chunk(num_micro_batches):
        if rank == 1:
            dist.recv(x, 0)
        start = time.perf_counter()
        output = stage(x.requires_grad_())
        busy_s += time.perf_counter() - start
        if rank == 0:
            dist.send(output.detach(), 1)
        tape.append((x, output))
    for x, output in tape:
        gradient = torch.ones_like(output)
        if rank == 0:
            dist.recv(gradient, 1)
        start = time.perf_counter()
        output.backward(gradient)
        busy_s += time.perf_counter() - start
        if rank == 1:
            dist.send(x.grad, 0)
    dist.barrier()
    return torch.tensor([busy_s, time.perf_counter() - begin])


for count in (1, 2, 4, 8):
    rounds = torch.stack([step(count) for _ in range(8)])
    dist.all_reduce(rounds)  # over both ranks
    measured = 100 * (1 - rounds[:, 0] / rounds[:, 1]).min()  # of the least disturbed round
    if rank == 0:
        theory = 100 / (1 + count)
        print(f"m = {count}: bubble {theory:.0f} % in theory, {measured:.0f} % measured")
dist.destroy_process_group()
