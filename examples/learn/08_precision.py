"""Compare float32, bfloat16 and float16, then train in float16 with a loss scale.

Run: python examples/learn/08_precision.py
"""

import torch
from torch import nn

print("type      largest   smallest  next after 1  tiny gradient 1e-8  256 + 1")
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    info = torch.finfo(dtype)
    tiny = torch.tensor(1e-8).to(dtype).item()
    total = (torch.tensor(256.0, dtype=dtype) + 1).item()
    name = str(dtype).removeprefix("torch.")
    print(
        f"{name:9} {info.max:.1e}   {info.tiny:.1e}   {1 + info.eps:<12.8g}  {tiny:<18.0e}  {total}"
    )


def train(scaled):
    """Train for 12 steps with float16 in forward and backward. Return the first and last loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=2e4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**36, enabled=scaled)
    x = torch.randn(32, 64)
    losses, scales = [], []
    for _ in range(12):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = 1e-5 * (model(x) - 1).float().square().mean()  # a loss with small gradients
        scaler.scale(loss).backward()  # gradients are scale times as large
        scaler.step(optimizer)  # divides them; skips the step if one is not finite
        scaler.update()  # halves the scale after an overflow
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    zeros = sum((parameter.grad == 0).sum().item() for parameter in model.parameters())
    print(
        f"{'with' if scaled else 'without'} loss scale: loss {losses[0]:.2e} -> {losses[-1]:.2e},"
        f" {zeros} gradients are 0"
    )
    assert scaled == (zeros == 0)  # without a scale, small gradients vanish
    return scales


train(scaled=False)
print(
    "scale after each step: 2 **", [int(torch.tensor(scale).log2()) for scale in train(scaled=True)]
)
