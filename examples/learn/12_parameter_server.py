"""A parameter server (rank 0) and two workers, of which rank 2 is slow: sync and async.

Run: torchrun --standalone --nproc-per-node 3 examples/learn/12_parameter_server.py
"""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
target = torch.randn(1000)


def serve(is_sync):
    """Apply the gradients of the workers until all have stopped."""
    weights, version, waiting, active = torch.zeros(1000), 0, [], size - 1
    pulled, updates, staleness = [0] * size, [0] * size, 0
    message = torch.empty(1001)
    while active:
        source = dist.recv(message)  # from any worker
        if message[0] < 0:
            active -= 1  # it has stopped
        else:
            weights -= 0.05 * message[1:]
            staleness = max(staleness, version - pulled[source])
            version, updates[source] = version + 1, updates[source] + 1
            waiting.append(source)
        while waiting and (not is_sync or len(waiting) >= active):
            for worker in waiting:
                dist.send(weights, worker)
                pulled[worker] = version
            waiting = []
    error = (weights - target).norm() / target.norm()
    name = "sync" if is_sync else "async"
    print(f"{name}: updates {updates[1:]}, error {error:.2f}, staleness up to {staleness}")


def work():
    """Compute gradients with the newest weights, and send them."""
    weights, begin = torch.zeros(1000), time.perf_counter()
    while time.perf_counter() - begin < 1:
        time.sleep(0.002 if rank == 1 else 0.02)  # the computation; rank 2 is slow
        dist.send(torch.cat([torch.ones(1), weights - target + torch.randn(1000)]), 0)
        dist.recv(weights, 0)
    dist.send(-torch.ones(1001), 0)


for is_sync in (True, False):
    serve(is_sync) if rank == 0 else work()
    dist.barrier()
dist.destroy_process_group()
