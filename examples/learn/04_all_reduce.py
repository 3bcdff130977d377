"""Four all-reduce algorithms as lists of messages, run on four ranks.

Run: torchrun --standalone --nproc-per-node 4 examples/learn/04_all_reduce.py
"""

import time
from itertools import chain

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
RANK, N = dist.get_rank(), dist.get_world_size()
assert N == 4, "this program needs 4 ranks"

# Each step lists messages: (source, target, first chunk, number of chunks, add or overwrite).
NAIVE = [[(r, 0, 0, N, True) for r in range(1, N)], [(0, r, 0, N, False) for r in range(1, N)]]
TREE = [[(r + bit, r, 0, N, True) for r in range(0, N, 2 * bit)] for bit in (1, 2)]
TREE += [[(r, r + bit, 0, N, False) for r in range(0, N, 2 * bit)] for bit in (2, 1)]
RING = [[(r, (r + 1) % N, (r - s) % N, 1, s < N - 1) for r in range(N)] for s in range(2 * N - 2)]
HALVING = [[(r, r ^ bit, (r ^ bit) & -bit, bit, True) for r in range(N)] for bit in (2, 1)]
HALVING += [[(r, r ^ bit, r & -bit, bit, False) for r in range(N)] for bit in (1, 2)]


def all_reduce(tensor, steps):
    """Sum a tensor over all ranks in place."""
    chunks = tensor.view(N, -1)
    for step in steps:
        works, arrivals = [], []
        for source, target, first, count, add in step:
            part = chunks[first : first + count]
            if source == RANK:
                works.append(dist.isend(part, target))
            if target == RANK:
                arrivals.append((part, torch.empty_like(part), add))
                works.append(dist.irecv(arrivals[-1][1], source))
        for work in works:
            work.wait()
        for part, new, add in arrivals:
            part.copy_(part + new if add else new)


for name, steps in {"naive": NAIVE, "tree": TREE, "ring": RING, "halving": HALVING}.items():
    sent = [0] * N
    for source, _, _, count, _ in chain(*steps):
        sent[source] += count / N
    for elements, times_s in ((256, []), (2**20, [])):
        for _ in range(30):  # the fastest round counts
            tensor = torch.full((elements,), 2.0**RANK)
            dist.barrier()
            start = time.perf_counter()
            all_reduce(tensor, steps)
            times_s.append(time.perf_counter() - start)
            assert (tensor == 15).all()  # 1 + 2 + 4 + 8
        if RANK == 0:
            text = f"{name:7} {len(steps)} steps, busiest rank sends {max(sent):.2f} x"
            print(f"{text} {tensor.nbytes:7} B: {1000 * min(times_s):.2f} ms")
dist.destroy_process_group()
