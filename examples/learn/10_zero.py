"""What a rank stores and sends under DDP, a hand-written ZeRO-1, and FSDP2 as ZeRO-2 and ZeRO-3.

Run: torchrun --standalone --nproc-per-node 4 examples/learn/10_zero.py
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parameters_to_vector, vector_to_parameters

dist.init_process_group("gloo")
assert dist.get_world_size() == 4, "the page shows 4 ranks"


class Traffic(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the elements that go through collectives; an all-reduce moves each of them twice."""

    moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors = [x for x in torch.utils._pytree.tree_leaves(args) if torch.is_tensor(x)]
            self.moved += (1 + ("allreduce" in func.name())) * max(x.numel() for x in tensors)
        return func(*args, **(kwargs or {}))


def stored(tensors):
    """Return the number of elements on this rank, in units of Psi (the number of parameters)."""
    return sum(getattr(x, "_local_tensor", x).numel() for x in tensors) / full.numel()


for name in ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(8)))
    full = parameters_to_vector(model.parameters()).detach()
    shard = full.chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()
    model = torch.nn.parallel.DistributedDataParallel(model) if name == "DDP" else model
    for module in [*model, model] if name in ("ZeRO-2", "ZeRO-3") else []:
        fully_shard(module, reshard_after_forward=name == "ZeRO-3")
    optimizer = torch.optim.Adam([shard] if name == "ZeRO-1" else model.parameters())
    with Traffic() as traffic:
        loss = model(torch.randn(8, 256) + dist.get_rank()).square().sum()
        weights = stored(model.parameters())  # between forward and backward
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        if name == "ZeRO-1":  # each rank updates its shard of the weights
            shard.grad = torch.empty_like(shard)
            dist.reduce_scatter_tensor(shard.grad, parameters_to_vector(gradients))
        optimizer.step()
        if name == "ZeRO-1":
            dist.all_gather_into_tensor(full, shard.detach())
            vector_to_parameters(full, model.parameters())
    moments = stored(x for state in optimizer.state.values() for x in state.values() if x.dim())
    assert moments == (2 if name == "DDP" else 2 / 4)
    if dist.get_rank() == 0:
        text = f"weights {weights:.2f}, gradients {stored(gradients):.2f}, Adam {moments:.2f} Psi"
        print(f"{name:6} {text}; collectives move {traffic.moved / full.numel():.2f} Psi per step")
dist.destroy_process_group()
