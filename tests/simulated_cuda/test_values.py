"""Test that simulated CUDA tensors behave as those of a GPU do: their values, and errors for
tensors on a wrong device."""

import os
import subprocess
import sys

import pytest
import torch
from device_runs import VARIABLES
from ranks import run_ranks
from simulated import simulate_values
from torch import nn
from torch.nn import functional

from paceline.train.optimizers import blockwise

pytestmark = pytest.mark.slow


def on_simulated_device(function):
    """Call a function in a new process with simulated devices, and return its result."""
    return run_ranks(simulate_and_call, 1, function, init_process_group=False)[0]


def simulate_and_call(_env, function):
    simulate_values()
    return function()


def train_linear(device):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(device)
    for _ in range(3):
        logits = model(torch.ones(6, 8, device=device))
        loss = functional.cross_entropy(logits, torch.arange(6, device=device) % 4)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return [parameter.detach().cpu() for parameter in model.parameters()], scaler.get_scale()


def train_on_both():
    with torch.autocast("cuda", dtype=torch.float16):
        dtype = nn.Linear(2, 2, device="cuda")(torch.ones(2, 2, device="cuda")).dtype
    return train_linear("cuda"), train_linear("cpu"), dtype


def test_training_with_loss_scaling_has_the_same_values():
    (weights, scale), (expected, expected_scale), dtype = on_simulated_device(train_on_both)
    assert (scale, dtype) == (expected_scale, torch.float16)
    assert all(map(torch.equal, weights, expected))


def change_memory():
    tensor = torch.arange(6.0, device="cuda:1").view(2, 3)
    tensor[:, 1:].t().mul_(2)
    storage = tensor.untyped_storage()
    storage.resize_(0)
    is_freed = storage.size()
    storage.resize_(24)
    tensor.copy_(torch.ones(2, 3), non_blocking=True)
    resized = torch.empty(0, device="cuda")
    torch.add(tensor.to("cuda:0"), 1, out=resized)
    return str(tensor.device), is_freed, resized.cpu(), tensor.sum().item()


def test_views_copies_and_freed_memory():
    device, is_freed, resized, total = on_simulated_device(change_memory)
    assert (device, is_freed, total) == ("cuda:1", 0, 6.0)
    assert torch.equal(resized, torch.full((2, 3), 2.0))


def mix_devices():
    on_cuda, on_cpu, errors = torch.ones(2, 2, device="cuda"), torch.ones(2, 2), []
    operations = {
        "add": lambda: on_cuda + on_cpu,
        "matmul": lambda: on_cpu @ on_cuda,
        "linear": lambda: nn.Linear(2, 2)(on_cuda),
        "embedding": lambda: functional.embedding(torch.tensor([0, 1]), on_cuda),
        "cross_entropy": lambda: functional.cross_entropy(on_cuda, torch.tensor([0, 1])),
        "in-place": lambda: on_cuda.add_(on_cpu),
    }
    for name, operation in operations.items():
        try:
            operation()
        except RuntimeError as error:
            errors.append((name, "Expected all tensors to be on the same device" in str(error)))
    # A GPU accepts these.
    on_cuda + torch.tensor(2.0)
    on_cuda[torch.tensor([1])] = 5.0
    on_cuda.copy_(on_cpu)
    return errors


def test_operation_on_tensors_of_two_devices_is_an_error():
    assert on_simulated_device(mix_devices) == [
        ("add", True),
        ("matmul", True),
        ("linear", True),
        ("embedding", True),
        ("cross_entropy", True),
        ("in-place", True),
    ]


@pytest.mark.soak
def test_a_new_process_has_the_devices():
    """A process that is not forked, as the ranks of another launcher are."""
    code = "import torch; print(torch.ones(2, device='cuda:3').sum().item())"
    done = subprocess.run(
        # torch warns about a deprecated package of NVIDIA where that is installed.
        [sys.executable, "-W", "ignore::FutureWarning", "-c", code],
        env=os.environ | VARIABLES,
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("2.0\n", "")


def convert_paged_state():
    """The state of a paged optimizer is in host memory, and its table and scales are on the GPU."""
    values = torch.rand(3, 500, generator=torch.Generator().manual_seed(0))
    table = torch.linspace(0, 1, 256)
    on_host, scales = blockwise.quantize(values, table, None)
    codes, _ = blockwise.quantize(values.cuda(), table.cuda(), scales)
    result = blockwise.dequantize(on_host, table.cuda(), scales.cuda())
    is_same = torch.equal(result, blockwise.dequantize(on_host, table, scales))
    return str(codes.device), torch.equal(codes.cpu(), on_host), str(result.device), is_same


def test_state_in_host_memory_is_converted_with_a_table_on_the_device():
    assert on_simulated_device(convert_paged_state) == ("cuda:0", True, "cpu", True)
