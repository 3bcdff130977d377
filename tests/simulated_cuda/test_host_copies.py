"""Copies between host and device wait on the stream of the tensor's device."""

import itertools

import pytest
import torch
from ranks import run_ranks
from simulated import simulate_values

from paceline.checkpoint import staging
from paceline.checkpoint.staging import StagingBuffer
from paceline.distributed.host_copies import HostCopy
from paceline.parallel.state import TensorShard
from paceline.simulation.cuda import observe_synchronizations

pytestmark = pytest.mark.slow


def copy_from_second_device(_env):
    simulate_values()
    values = torch.arange(3.0, device="cuda:1")
    assert torch.accelerator.current_device_index() == 0
    copy = HostCopy(values)
    return copy._event.device, copy.read()


def test_event_of_a_copy_is_recorded_on_the_device_of_the_tensor():
    ((device, values),) = run_ranks(copy_from_second_device, 1, init_process_group=False)
    assert device == torch.device("cuda:1")
    assert torch.equal(values, torch.arange(3.0))


def stage_with_few_pinned(_env, num_pinned):
    """Stage three shards, each in a block of its own, of which only the first ``num_pinned`` can be
    pinned. Return the waits for the device, and why memory is not pinned."""
    simulate_values()
    staging._BLOCK_BYTES = 16
    waits, numbers, empty = [], itertools.count(), torch.empty

    def allocate(*sizes, pin_memory=False, **options):
        if pin_memory and next(numbers) >= num_pinned:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*sizes, pin_memory=pin_memory, **options)

    shards = [
        TensorShard(f"weight {number}", torch.full((4,), float(number), device="cuda"), (4,), (0,))
        for number in range(3)
    ]
    observe_synchronizations(lambda name, recorded_at: waits.append(name))
    torch.empty = allocate
    buffer = StagingBuffer(torch.device("cuda", 0))
    copies = [shard.tensor.tolist() for shard in buffer.copy(shards)]
    return waits, buffer.unpinned, copies


@pytest.mark.parametrize("num_pinned", [1, 3])
def test_staging_waits_for_copies_into_blocks_pinned_before_a_failure(num_pinned):
    ((waits, unpinned, copies),) = run_ranks(
        stage_with_few_pinned, 1, num_pinned, init_process_group=False
    )
    assert waits[-1] == "device.synchronize"
    assert (unpinned is None) == (num_pinned == 3)
    assert copies == [[float(number)] * 4 for number in range(3)]
