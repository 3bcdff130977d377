"""Ring attention: each rank has a part of a long sequence, and keys travel around the ring.

Run: torchrun --standalone --nproc-per-node 4 examples/learn/11_context.py
"""

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
assert size == 4, "the page shows 4 ranks"
torch.manual_seed(0)
query, key, value = torch.randn(3, 1024, 64)  # one head
whole = scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True)[0]

count = len(query) // size
own = torch.arange(rank * count, (rank + 1) * count)
block = torch.stack((key[own], value[own]))
output, lse = torch.zeros(count, 64), torch.full((count, 1), -torch.inf)
pairs = sent = 0
for step in range(size):
    works, received = [], torch.empty_like(block)
    if step < size - 1:  # the next block is on its way while this one is computed
        works = [dist.isend(block, (rank + 1) % size), dist.irecv(received, (rank - 1) % size)]
        sent += block.nbytes
    positions = torch.arange(count) + (rank - step) % size * count  # of the keys in the block
    hidden = positions > own[:, None]
    if not hidden.all():
        scores = (query[own] @ block[0].T / 8).masked_fill(hidden, -torch.inf)
        total = torch.logaddexp(lse, scores.logsumexp(1, keepdim=True))
        output = output * (lse - total).exp() + (scores - total).exp() @ block[1]
        lse = total
    pairs += int((~hidden).sum())
    for work in works:
        work.wait()
    block = received

results = [None] * size
dist.all_gather_object(results, (pairs, sent, bool((output - whole[own]).abs().max() < 1e-5)))
assert all(is_equal for _, _, is_equal in results)
if rank == 0:
    for number, (pairs, sent, is_equal) in enumerate(results):
        print(f"rank {number}: {pairs} pairs, sent {sent} B, equal to one rank {is_equal}")
dist.destroy_process_group()
