"""A parameter server (rank 0) and two workers, of which rank 2 is slow: sync and async.

Run: torchrun --standalone --nproc-per-node 3 examples/learn/12_parameter_server.py
"""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
assert size == 3, "this program needs a server and 2 workers"
torch.manual_seed(0)
target = torch.randn(1000)
torch.manual_seed(rank)  # each worker has its own noise


def serve(is_sync):
    """Apply the gradients of the workers for a second."""
    weights, version, gradients, active = torch.zeros(1000), 0, {}, size - 1
    pulled, counts, staleness = [0] * size, [0] * size, 0  # pulled: the version of each worker
    message, begin = torch.empty(1000), time.perf_counter()
    while active:
        source = dist.recv(message)  # from any worker
        gradients[source] = message.clone()
        counts[source] += 1
        staleness = max(staleness, version - pulled[source])
        if is_sync and len(gradients) < active:
            continue  # wait for the others
        weights, version = weights - 0.05 * sum(gradients.values()), version + 1
        is_over = time.perf_counter() - begin > 1
        for worker in gradients:
            dist.send(torch.cat([torch.tensor([float(is_over)]), weights]), worker)
            pulled[worker] = version
        active -= len(gradients) if is_over else 0
        gradients = {}
    error = (weights - target).norm() / target.norm()
    assert error < 0.5
    assert staleness == 0 or not is_sync
    name = "sync" if is_sync else "async"
    print(f"{name}: gradients {counts[1:]}, error {error:.2f}, staleness up to {staleness}")


def work():
    """Compute gradients with the newest weights, and send them."""
    answer = torch.zeros(1001)  # whether the training is over, and the weights
    while not answer[0]:
        time.sleep(0.002 if rank == 1 else 0.02)  # the computation; rank 2 is slow
        dist.send(answer[1:] - target + torch.randn(1000), 0)
        dist.recv(answer, 0)


for is_sync in (True, False):
    serve(is_sync) if rank == 0 else work()
    dist.barrier()
dist.destroy_process_group()
