"""Count the bytes of parameters, gradients, optimizer state and activations.

Run: python examples/learn/09_memory.py
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(8)]
model = nn.Sequential(*blocks)
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.randn(512, 256)


def size_of(tensors):
    """Return the bytes of the distinct storages of tensors."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def saved_for_backward(forward):
    """Return the bytes of what autograd saves in a forward pass, apart from parameters."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        loss = forward().square().mean()
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    size_bytes = size_of(x for x in saved if x.data_ptr() not in parameters)
    loss.backward()
    return size_bytes


plain = saved_for_backward(lambda: model(batch))
gradients = [parameter.grad.clone() for parameter in model.parameters()]
model.zero_grad()
checkpointed = saved_for_backward(
    lambda: checkpoint_sequential(model, 8, batch, use_reentrant=False)
)
equal = all(
    torch.equal(old, new.grad) for old, new in zip(gradients, model.parameters(), strict=True)
)
assert equal
optimizer.step()
state = [x for values in optimizer.state.values() for x in values.values()]
for name, size_bytes in {
    "parameters": size_of(model.parameters()),
    "gradients": size_of(parameter.grad for parameter in model.parameters()),
    "optimizer state": size_of(state),
    "activations": plain,
    "activations, checkpointed": checkpointed,
}.items():
    print(f"{name:26} {size_bytes / 2**20:6.2f} MiB")
print("gradients with and without checkpointing are equal:", equal)
