"""Training with torchrun, DistributedDataParallel, float16 and GradScaler.

torchrun --standalone --nproc-per-node 2 torchrun_amp.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

has_gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if has_gpu else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")

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
scaler = torch.amp.GradScaler(device.type)

for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.float16):
            loss = criterion(model(x.to(device)), y.to(device))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        mean = loss.detach() / world_size
        dist.all_reduce(mean)
        if rank == 0:
            print(f"loss {mean.item():.9f}")
if rank == 0:
    torch.save(model.module.state_dict(), "model.pt")
dist.destroy_process_group()
