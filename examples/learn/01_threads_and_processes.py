"""Train the same small model in two threads and in two processes, and compare the speed.

Run: python examples/learn/01_threads_and_processes.py
"""

import threading
import time

import torch
import torch.multiprocessing as mp
from torch import nn

WORKERS, ROUNDS, STEPS = 2, 50, 5


def train(number, barrier, seconds):
    """Train with many small layers: most of the time is Python, not arithmetic."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(200)))
    batch = torch.randn(8, 16)
    model(batch).sum().backward()  # warm up
    for _ in range(ROUNDS):  # the fastest round counts
        barrier.wait()  # start together
        start = time.perf_counter()
        for _ in range(STEPS):
            model(batch).sum().backward()
        elapsed_s = time.perf_counter() - start
        seconds[number] = min(seconds[number] or elapsed_s, elapsed_s)


if __name__ == "__main__":
    times = [0.0] * WORKERS
    train(0, threading.Barrier(1), times)
    print(f"1 thread      {STEPS / times[0]:6.0f} batches/s")
    args = (threading.Barrier(WORKERS), times)
    threads = [threading.Thread(target=train, args=(number, *args)) for number in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert min(times) > 0, "a thread has not measured its time"
    print(f"{WORKERS} threads     {WORKERS * STEPS / max(times):6.0f} batches/s")
    context = mp.get_context("spawn")
    times = context.Array("d", WORKERS)
    mp.spawn(train, (context.Barrier(WORKERS), times), nprocs=WORKERS)
    assert min(times) > 0, "a process has not measured its time"
    print(f"{WORKERS} processes   {WORKERS * STEPS / max(times):6.0f} batches/s")
