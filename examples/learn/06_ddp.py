"""Watch DistributedDataParallel: buckets, overlap, no_sync, unused parameters.

Run: torchrun --standalone --nproc-per-node 2 examples/learn/06_ddp.py
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
assert dist.get_world_size() == 2, "this program needs 2 ranks"
calls = []


def record(group, bucket):
    """All-reduce a bucket as DDP does, and note when it starts."""
    calls.append((bucket.index(), bucket.buffer().nbytes, time.perf_counter()))
    return allreduce_hook(group, bucket)


def log(*args):
    if dist.get_rank() == 0:
        print(*args)


layers = [nn.Linear(512, 512) for _ in range(8)]
ddp = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=2.1)
ddp.register_comm_hook(None, record)
batch = torch.randn(256, 512)
for _ in range(3):  # DDP orders its buckets anew after the first step
    calls.clear()
    loss = ddp(batch).square().mean()
    start = time.perf_counter()
    loss.backward()
end = time.perf_counter()
for index, size_bytes, at in calls:
    log(f"bucket {index}: {size_bytes} B, starts at {(at - start) / (end - start):.0%} of backward")

calls.clear()
with ddp.no_sync():
    ddp(batch).square().mean().backward()
assert not calls
log("all-reduces with no_sync:", len(calls))
ddp(batch).square().mean().backward()
log("all-reduces of the next backward:", len(calls))

layers[3].forward = lambda x: x  # a layer whose parameters the loss does not use
try:
    for _ in range(2):
        ddp(batch).square().mean().backward()
except RuntimeError as error:
    log("unused parameters:", str(error).split(". ")[0])
dist.barrier()  # the other rank may still need this one for its all-reduces
dist.destroy_process_group()
