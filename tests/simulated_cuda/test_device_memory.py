"""Test that memory of simulated CUDA tensors with values is counted and limited as a GPU's
allocator does."""

from functools import partial

import pytest
import torch
from test_values import on_simulated_device
from torch import nn
from torch.nn import functional

from paceline.simulation.records import ALLOCATION_BYTES

pytestmark = pytest.mark.slow

KIB = 1024


def allocated():
    return torch.cuda.memory_allocated() // KIB


def peak_of(function):
    """Return the KiB that a function adds to the allocated memory, at most and in the end."""
    before = allocated()
    torch.cuda.reset_peak_memory_stats()
    result = function()
    return torch.cuda.max_memory_allocated() // KIB - before, allocated() - before, result


def measure_storages():
    sizes = [allocated()]
    tensor = torch.zeros(256, 4, device="cuda")  # 4 KiB
    sizes.append(allocated())
    views = tensor[1:], tensor.t(), tensor.view(-1), tensor.detach()
    sizes.append(allocated())
    on_host = torch.ones(1024), tensor.cpu(), tensor.to("cpu", torch.float64).pin_memory()
    sizes.append(allocated())
    result = tensor * 2
    sizes.append(allocated())
    result.add_(1).mul_(tensor)
    sizes.append(allocated())
    tensor.untyped_storage().resize_(0)
    sizes.append(allocated())
    tensor.untyped_storage().resize_(4096)
    sizes.append(allocated())
    moved = on_host[0].to("cuda")
    sizes.append(allocated())
    del tensor, views, result, moved
    sizes.append(allocated())
    return sizes


def test_storages_count_until_they_are_freed():
    assert on_simulated_device(measure_storages) == [0, 4, 4, 4, 8, 8, 4, 8, 12, 0]


def round_sizes():
    sizes = []
    for size in (0, 1, 512, 513):
        before = torch.cuda.memory_allocated()
        operand = torch.zeros(size, dtype=torch.uint8, device="cuda")
        result = operand + operand
        sizes.append((torch.cuda.memory_allocated() - before, result.numel()))
        del operand, result
    statistics = torch.cuda.memory_stats()
    names = ("allocation", "allocated_bytes", "requested_bytes", "reserved_bytes")
    return sizes, [statistics[f"{name}.all.peak"] for name in names]


def test_sizes_are_rounded_as_the_caching_allocator_does():
    sizes, peaks = on_simulated_device(round_sizes)
    block = ALLOCATION_BYTES
    assert sizes == [(0, 0), (2 * block, 1), (2 * block, 512), (4 * block, 513)]
    assert peaks == [2, 4 * block, 2 * 513, 4 * block]


def measure_devices():
    torch.cuda.set_device(1)
    first = torch.ones(512, device="cuda")
    second = torch.ones(1024, device="cuda:2") * 2
    free = [torch.cuda.mem_get_info(index) for index in range(4)]
    used = [torch.cuda.memory_allocated(index) for index in range(4)]
    del first, second
    torch.cuda.reset_peak_memory_stats(2)
    peaks = [torch.cuda.max_memory_allocated(index) for index in range(4)]
    return used, [total - each for each, total in free], peaks


def test_each_device_has_memory():
    used, taken, peaks = on_simulated_device(measure_devices)
    assert used == taken == [0, 2048, 4096, 0]
    assert peaks == [0, 2048, 0, 0]


def measure_operations():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, 64, 32, generator=generator).cuda().requires_grad_()  # 16 KiB
    weights = [torch.randn(64, 64, device="cuda") for _ in range(4)]  # 16 KiB each
    results = {}
    # scores of 2 × 64 × 64, their softmax, and what the product reads
    results["attention"] = peak_of(
        lambda: functional.scaled_dot_product_attention(query, query, query)
    )
    output = results["attention"][2]
    results["backward"] = peak_of(output.sum().backward)
    results["foreach"] = peak_of(lambda: torch._foreach_mul(weights, 2.0))
    results["in place"] = peak_of(lambda: torch._foreach_mul_(weights, 2.0))
    results["norm"] = peak_of(lambda: torch._foreach_norm(weights, dtype=torch.float64))
    return {name: sizes[:2] for name, sizes in results.items()}


def test_results_of_operations_count():
    sizes = on_simulated_device(measure_operations)
    peak, kept = sizes["attention"]
    assert peak >= kept >= 32 + 16  # the probabilities that backward reads, and the result
    peak, kept = sizes["backward"]
    assert peak >= 3 * 16  # the gradients of query, key and value
    assert kept <= 16 - 32  # the gradient of the leaf, but no probabilities
    assert sizes["foreach"][0] == 4 * 16
    assert sizes["in place"] == (0, 0)
    assert sizes["norm"] == (2, 2)  # four numbers, and no copy of the operands in float64


def train_steps(**options):
    model = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    sizes = []
    for _ in range(2):
        model(torch.ones(8, 128, device="cuda")).sum().backward()
        optimizer.step()
        sizes.append(allocated())
    return sizes


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}])
def test_state_of_an_optimizer_counts(options):
    numel = 2 * 128 * 256 + 256 + 128
    sizes = on_simulated_device(partial(train_steps, **options))
    # parameters, gradients and two moments; for each parameter a step count, in a block
    steps_kib = 4 * ALLOCATION_BYTES / KIB
    assert sizes == [pytest.approx(4 * 4 * numel / KIB, abs=steps_kib)] * 2


def exceed_limit():
    kept = torch.ones(256, device="cuda")
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(8 * KIB / total)
    messages, host = [], torch.ones(1 << 20)
    operations = (
        lambda: torch.empty(2048, device="cuda"),
        lambda: kept.repeat(8),  # its result
        lambda: host.cuda(),
        lambda: kept.untyped_storage().resize_(8 * KIB),
    )
    for operation in operations:
        try:
            operation()
        except torch.OutOfMemoryError as error:
            messages.append(str(error).splitlines()[0])
    fits = kept.repeat(6).sum().item()
    torch.cuda.set_per_process_memory_fraction(1.0)
    ooms = torch.cuda.memory_stats()["num_ooms"]
    return messages, fits, kept.repeat(8).sum().item(), allocated(), ooms


def test_error_above_the_limit():
    messages, fits, unlimited, kept, ooms = on_simulated_device(exceed_limit)
    assert [message[: message.index(". GPU 0 has")] for message in messages] == [
        "CUDA out of memory. Tried to allocate 8.00 KiB",
        "CUDA out of memory. Tried to allocate 8.00 KiB",
        "CUDA out of memory. Tried to allocate 4.00 MiB",
        "CUDA out of memory. Tried to allocate 8.00 KiB",
    ]
    assert "8.00 KiB allowed; Of the allocated memory 1.00 KiB" in messages[0]
    assert (fits, unlimited, kept, ooms) == (6 * 256, 8 * 256, 1, 4)


def fill_device():
    total = torch.cuda.mem_get_info()[1]
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 74\.51 GiB"):
        torch.empty(total + 1, dtype=torch.uint8, device="cuda")


def test_memory_of_the_device_is_the_limit():
    on_simulated_device(fill_device)


def fail_in_backward():
    """Backward runs in a thread of the device."""
    value = torch.ones(512, 512, device="cuda", requires_grad=True)  # 1 MiB
    loss = value.exp().sum()
    limit = torch.cuda.memory_allocated() + 512 * KIB
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    torch.cuda.set_per_process_memory_fraction(1.0)
    loss.backward()
    return str(value.grad.device), allocated()


def test_backward_counts():
    device, size = on_simulated_device(fail_in_backward)
    assert device == "cuda:0"
    assert 2 * KIB <= size <= 3 * KIB + 2
