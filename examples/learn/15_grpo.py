"""A policy on two ranks learns to answer with the last of three digits, from rewards only.

Run: torchrun --standalone --nproc-per-node 2 examples/learn/15_grpo.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PROMPTS, GROUP, UPDATES, CLIP = 16, 8, 4, 0.2  # prompts per rank, completions per prompt

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
layers = nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 10)
policy = DistributedDataParallel(nn.Sequential(nn.Embedding(10, 16), nn.Flatten(), *layers))
optimizer = torch.optim.Adam(policy.parameters(), lr=0.003)
draws = torch.Generator().manual_seed(rank)  # each rank has its own prompts and answers

for step in range(1, 31):
    prompts = torch.randint(10, (PROMPTS, 3), generator=draws)
    with torch.no_grad():  # rollout
        old_logps = policy(prompts).log_softmax(dim=1)
    answers = old_logps.exp().multinomial(GROUP, replacement=True, generator=draws)
    rewards = (answers == prompts[:, 2:]).float()
    # A group is on one rank, so the ranks need not exchange rewards.
    deviation = rewards.std(dim=1, keepdim=True)
    advantages = (rewards - rewards.mean(dim=1, keepdim=True)) / (deviation + 1e-4)
    for _ in range(UPDATES):
        ratio = (policy(prompts).log_softmax(dim=1) - old_logps).gather(1, answers).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        loss = -torch.min(ratio * advantages, clipped * advantages).mean()
        optimizer.zero_grad()
        loss.backward()  # DDP averages the gradients of the ranks
        optimizer.step()
    shares = [rewards, (deviation > 0).float(), (ratio != clipped).float()]
    figures = torch.stack([values.mean() for values in shares])
    dist.all_reduce(figures)
    reward, signal, outside = (figures / size).tolist()
    if rank == 0 and (step == 1 or step % 5 == 0):
        text = f"step {step:2}   reward {reward:.2f}   groups with signal {signal:.2f}"
        print(f"{text}   ratios outside the range {outside:.2f}")
assert reward > 0.8
dist.destroy_process_group()
