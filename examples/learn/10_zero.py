"""What a rank stores and sends under DDP, ZeroRedundancyOptimizer and FSDP2.

Run: torchrun --standalone --nproc-per-node 4 examples/learn/10_zero.py
"""

from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam
from torch.utils._python_dispatch import TorchDispatchMode

dist.init_process_group("gloo")


class Traffic(TorchDispatchMode):
    """Counts the elements that go through collectives; an all-reduce moves each of them twice."""

    sent = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors = [x for x in torch.utils._pytree.tree_leaves(args) if torch.is_tensor(x)]
            passes = 2 if "allreduce" in func.name() else 1
            self.sent += passes * max(x.numel() for x in tensors)
        return func(*args, **(kwargs or {}))


def stored(tensors, psi):
    return sum(getattr(x, "_local_tensor", x).numel() for x in tensors if x is not None) / psi


for name in ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"):
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(8)))
    psi = sum(parameter.numel() for parameter in model.parameters())
    if name in ("ZeRO-2", "ZeRO-3"):
        for module in [*model, model]:
            fully_shard(module, reshard_after_forward=name == "ZeRO-3")
    else:
        model = DistributedDataParallel(model)
    make = partial(ZeroRedundancyOptimizer, optimizer_class=Adam) if name == "ZeRO-1" else Adam
    optimizer = make(model.parameters())
    with Traffic() as traffic:
        model(torch.randn(8, 256)).sum().backward()
        optimizer.step()
    weights = stored(model.parameters(), psi)
    gradients = stored([parameter.grad for parameter in model.parameters()], psi)
    inner = getattr(optimizer, "optim", optimizer)
    moments = stored([x for v in inner.state.values() for x in v.values() if x.dim()], psi)
    if dist.get_rank() == 0:
        text = f"{name:6} weights {weights:.2f}, gradients {gradients:.2f}, Adam {moments:.2f} Psi"
        print(f"{text}; collectives move {traffic.sent / psi:.2f} Psi per step")
dist.destroy_process_group()
