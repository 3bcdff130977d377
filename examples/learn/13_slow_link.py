"""Send less over a slow link: top-k with and without error feedback, local SGD, DiLoCo.

Run: torchrun --standalone --nproc-per-node 2 examples/learn/13_slow_link.py
"""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
assert size == 2, "this program needs 2 ranks"
DIM, STEPS, EVERY, LINK = 1000, 200, 20, 1.25e6  # LINK: bytes per second of 10 Mbit/s
torch.manual_seed(0)
target, scales = torch.randn(DIM), torch.logspace(0, -1.5, DIM)


def mean(tensor, sent_bytes):
    """Average over the ranks, in the time that the bytes of each rank need on the slow link."""
    time.sleep(sent_bytes / LINK)
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
    outer, sent, begin = weights.clone(), 0, time.perf_counter()
    for step in range(1, STEPS + 1):
        gradient, sent_bytes = scales * (weights - target) + 0.3 * torch.randn(DIM), 4 * DIM
        if method.startswith("top-k"):
            gradient, residual = top_k(gradient, residual, "feedback" in method)
            sent_bytes = 8 * DIM // 50  # a value and an index of each element
        if method not in ("local SGD", "DiLoCo"):
            gradient, sent = mean(gradient, sent_bytes), sent + sent_bytes
        weights = weights - 0.3 * gradient
        if method in ("local SGD", "DiLoCo") and step % EVERY == 0:
            change, sent = outer - mean(weights, sent_bytes), sent + sent_bytes
            momentum = 0.6 * momentum + change
            outer = outer - (change if method == "local SGD" else change + 0.6 * momentum)
            weights = outer.clone()
    error = (weights - target).norm() / target.norm()
    assert error < 0.6
    if rank == 0:
        seconds = time.perf_counter() - begin
        print(f"{method:17} error {error:.3f}   sent {sent:6} B in {seconds:.2f} s")
dist.destroy_process_group()
