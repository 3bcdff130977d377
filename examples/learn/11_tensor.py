"""Divide a two-layer network over two ranks: columns of the first matrix, rows of the second.

Run: torchrun --standalone --nproc-per-node 2 examples/learn/11_tensor.py
"""

import torch
import torch.distributed as dist
from torch.nn.functional import gelu

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
assert size == 2, "the page shows 2 ranks"
torch.manual_seed(0)
x, first, second = torch.randn(32, 64), torch.randn(64, 256) / 8, torch.randn(256, 64) / 16
first.requires_grad_()
full = gelu(x @ first) @ second
full.square().mean().backward()

columns = first.detach().chunk(size, dim=1)[rank].clone().requires_grad_()
rows = second.chunk(size, dim=0)[rank]
part = gelu(x @ columns) @ rows  # a partial sum of the output: no communication before it
total = part.detach().clone()
dist.all_reduce(total)  # the only communication of the forward pass
part.backward(2 * total / total.numel())  # the gradient of the output is the same on all ranks

error = (total - full).norm() / full.norm()
expected = first.grad.chunk(size, dim=1)[rank]
gradient_error = (columns.grad - expected).norm() / expected.norm()
assert max(error, gradient_error) < 1e-5
stored, size = columns.numel() + rows.numel(), first.numel() + second.numel()
if rank == 0:
    print(f"weights on each rank: {stored} of {size}")
    print(f"sent forward: one all-reduce of {total.nbytes} B")
    print(
        f"relative difference below 1e-5: output {error < 1e-5}, gradient {gradient_error < 1e-5}"
    )
dist.destroy_process_group()
