"""Training with DistributedDataParallel, with one process per GPU from mp.spawn."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(rank, world_size):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    has_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpu else "gloo", rank=rank, world_size=world_size)
    device = torch.device("cuda", rank) if has_gpu else torch.device("cpu")

    generator = torch.Generator().manual_seed(1)
    images = torch.randn(640, 64, generator=generator)
    labels = (images @ torch.randn(64, 10, generator=generator)).argmax(dim=1)
    dataset = TensorDataset(images, labels)
    sampler = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            mean = loss.detach() / world_size
            dist.all_reduce(mean)
            if rank == 0:
                print(f"loss {mean.item():.9f}")
    if rank == 0:
        torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    num_processes = torch.cuda.device_count() or 2
    mp.spawn(main, args=(num_processes,), nprocs=num_processes)
