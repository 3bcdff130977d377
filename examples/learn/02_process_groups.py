"""Start four ranks with mp.spawn or with torchrun, and all-reduce within groups of them.

Run: python examples/learn/02_process_groups.py
     torchrun --standalone --nproc-per-node 4 examples/learn/02_process_groups.py
"""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def main(rank, world_size, address):
    """Run on every rank. Rank 0 prints what all ranks have."""
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    assert world_size == 4, "this program needs 4 ranks"
    rows = [[0, 1], [2, 3]]
    groups = [dist.new_group(row) for row in rows]  # every rank creates every group
    value = torch.tensor(10**rank)
    total, row_total = value.clone(), value.clone()
    dist.all_reduce(total)
    dist.all_reduce(row_total, group=groups[rank // 2])
    assert total == 1111
    assert row_total == (11 if rank < 2 else 1100)
    lines = [None] * world_size
    text = (
        f"rank {rank}: own {value:4d}, sum of row {rows[rank // 2]} {row_total:4d}, of all {total}"
    )
    dist.all_gather_object(lines, text)
    if rank == 0:
        print(f"{dist.get_world_size()} ranks, backend {dist.get_backend()}", *lines, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun has started this process, and knows the others
        main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://")
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        mp.spawn(main, (4, f"tcp://127.0.0.1:{port}"), nprocs=4)
