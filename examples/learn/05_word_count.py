"""Count words over three ranks: map, shuffle, reduce.

Run: torchrun --standalone --nproc-per-node 3 examples/learn/05_word_count.py
"""

import zlib

import torch.distributed as dist

LINES = ["the ring and the tree", "a ring of ranks", "the ranks of a tree", "a tree"]

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
assert size == 3, "the page shows 3 ranks"


def show(title, value):
    """Print the value of each rank, in rank order."""
    values = [None] * size
    dist.all_gather_object(values, value)
    if rank == 0:
        print(
            title, *(f"  rank {number}: {value}" for number, value in enumerate(values)), sep="\n"
        )


# Map: each rank makes pairs from its share of the lines.
pairs = [(term, 1) for line in LINES[rank::size] for term in line.split()]
show("pairs after map", pairs)

# Shuffle: equal words go to the same rank. A checksum chooses it, because hash() of a str differs
# between processes.
parcels = [[] for _ in range(size)]
for term, count in pairs:
    parcels[zlib.crc32(term.encode()) % size].append((term, count))
arrived = []
for source in range(size):
    parcel = [None]
    dist.scatter_object_list(parcel, parcels if rank == source else None, src=source)
    arrived += parcel[0]
groups = {}
for term, count in sorted(arrived):
    groups.setdefault(term, []).append(count)
show("groups after shuffle", groups)

# Reduce: each rank sums its groups.
counts = {term: sum(ones) for term, ones in groups.items()}
assert all(counts[term] == " ".join(LINES).split().count(term) for term in counts)
show("counts after reduce", counts)
dist.destroy_process_group()
