r"""Kill a rank in the middle of a training, restart from the checkpoint, compare the weights.

Run: torchrun --standalone --nproc-per-node 2 examples/learn/14_elastic.py
     TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 2 \
         --max-restarts 1 examples/learn/14_elastic.py --kill
"""

import hashlib
import os
import signal
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FILE = os.path.join(tempfile.gettempdir(), "paceline-learn-14.pt")
dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
assert dist.get_world_size() == 2, "this program needs 2 ranks"
torch.manual_seed(0)
model, step = nn.Linear(8, 1), 0
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
if attempt > 0:  # torchrun has started all ranks again
    state = torch.load(FILE, weights_only=True)
    step = state["step"]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if rank == 0:
        print(f"attempt {attempt}: resume at step {step}", flush=True)
ddp = DistributedDataParallel(model)
while step < 20:
    # The samples of a step follow from its number and the rank: nothing is seen twice or left out.
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
    optimizer.zero_grad()
    (ddp(x) - x.sum(dim=1, keepdim=True)).square().mean().backward()
    optimizer.step()
    step += 1
    if rank == 0 and step % 5 == 0:  # complete or absent: the old file is replaced at once
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, FILE + ".part")
        os.replace(FILE + ".part", FILE)
    if "--kill" in sys.argv and rank == 1 and step == 13 and attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)
if rank == 0:
    values = model.weight.detach().numpy().tobytes() + model.bias.detach().numpy().tobytes()
    print(f"step {step}, weights {hashlib.sha256(values).hexdigest()[:16]}")
dist.destroy_process_group()
