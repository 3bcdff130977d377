"""Send less: top-k with and without error feedback, local SGD, DiLoCo.

Run: torchrun --standalone --nproc-per-node 2 examples/learn/13_slow_link.py
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
DIM, STEPS, EVERY, LINK = 1000, 200, 20, 1.25e6  # LINK: bytes per second of 10 Mbit/s
torch.manual_seed(0)
target, scales = torch.randn(DIM), torch.logspace(0, -1.5, DIM)


def mean(tensor):
    dist.all_reduce(tensor)
    return tensor / size


def top_k(gradient, residual, feedback):
    """Keep the largest 2 % of the elements. The rest is added to the next gradient, or lost."""
    total = gradient + residual if feedback else gradient
    kept = torch.zeros(DIM)
    index = total.abs().topk(DIM // 50).indices
    kept[index] = total[index]
    return kept, total - kept


for method in ("all-reduce", "top-k", "top-k + feedback", "local SGD", "DiLoCo"):
    torch.manual_seed(rank)  # each rank has its own samples
    weights, residual, momentum = torch.zeros(DIM), torch.zeros(DIM), torch.zeros(DIM)
    outer, sent = weights.clone(), 0
    for step in range(1, STEPS + 1):
        gradient = scales * (weights - target) + 0.3 * torch.randn(DIM)
        if method == "all-reduce":
            gradient, sent = mean(gradient), sent + 4 * DIM
        elif method.startswith("top-k"):
            gradient, residual = top_k(gradient, residual, "feedback" in method)
            gradient, sent = mean(gradient), sent + 8 * DIM // 50  # a value and an index each
        weights = weights - 0.3 * gradient
        if method in ("local SGD", "DiLoCo") and step % EVERY == 0:
            change, sent = outer - mean(weights), sent + 4 * DIM
            momentum = 0.6 * momentum + change
            outer = outer - (change if method == "local SGD" else change + 0.6 * momentum)
            weights = outer.clone()
    error = (weights - target).norm() / target.norm()
    if rank == 0:
        print(f"{method:17} error {error:.3f}   sent {sent:>6} B, {sent / LINK:.2f} s at 10 Mbit/s")
dist.destroy_process_group()
