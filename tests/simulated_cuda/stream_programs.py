"""Small programs for the checker of streams: those that are right, and those with one fault."""

from collections.abc import Callable

import torch

from paceline.checkpoint.staging import StagingBuffer
from paceline.distributed.host_copies import HostCopy
from paceline.parallel.state import TensorShard

SIZE = 1024
DEVICE = torch.device("cuda", 0)


def _pinned() -> torch.Tensor:
    return torch.zeros(SIZE, pin_memory=True)


def _side() -> tuple[torch.Tensor, torch.Stream, torch.Stream]:
    """Return values that the current stream has computed, that stream, and another."""
    values = torch.ones(SIZE, device=DEVICE).mul_(2.0)
    return values, torch.accelerator.current_stream(DEVICE), torch.Stream(DEVICE)


# -- right
def wait_for_both_streams() -> None:
    values, main, side = _side()
    side.wait_stream(main)
    with side:
        values.add_(1.0)
    main.wait_stream(side)
    values.add_(1.0)


def read_on_both_streams() -> None:
    values, main, side = _side()
    side.wait_stream(main)
    with side:
        total = values.sum()
    values.sum()
    main.wait_stream(side)
    del total, values


def use_different_parts() -> None:
    values, main, side = _side()
    side.wait_stream(main)
    with side:
        values[: SIZE // 2].add_(1.0)
    values[SIZE // 2 :].add_(1.0)
    main.wait_stream(side)


def wait_for_the_host() -> None:
    values, main, side = _side()
    main.synchronize()
    with side:
        values.add_(1.0)
    torch.cuda.synchronize()
    values.add_(1.0)


def wait_for_an_event() -> None:
    values, main, side = _side()
    side.wait_event(main.record_event())
    values.sum()
    with side:
        values.sum()
        event = side.record_event()
    main.wait_event(event)
    values.add_(1.0)


def free_with_record_stream() -> None:
    values, main, side = _side()
    side.wait_stream(main)
    with side:
        values.sum()
    values.record_stream(side)
    del values
    torch.empty(SIZE, device=DEVICE)
    main.wait_stream(side)


def free_after_the_wait() -> None:
    values, main, side = _side()
    side.wait_stream(main)
    with side:
        values.sum()
    main.wait_stream(side)
    del values
    torch.empty(SIZE, device=DEVICE)


def free_before_the_wait() -> None:
    """No memory is allocated in between, so none is used again."""
    values, main, side = _side()
    side.wait_stream(main)
    with side:
        values.sum()
    del values
    main.wait_stream(side)
    torch.empty(SIZE, device=DEVICE)


def read_pinned_after_the_event() -> None:
    values, main, _ = _side()
    target = _pinned()
    target.copy_(values, non_blocking=True)
    main.record_event().synchronize()
    target.sum()


def read_pinned_after_a_value() -> None:
    values, _, _ = _side()
    target = _pinned()
    target.copy_(values, non_blocking=True)
    values.sum().item()
    target.tolist()


def free_pinned_at_once() -> None:
    _pinned().to(DEVICE, non_blocking=True)


def copy_between_devices() -> None:
    values, _, _ = _side()
    target = torch.empty(SIZE, device="cuda:1")
    target.copy_(values, non_blocking=True)
    values.add_(1.0)
    target.add_(1.0)


def backward_on_the_stream_of_forward() -> None:
    values, main, side = _side()
    weight = torch.ones(SIZE, device=DEVICE, requires_grad=True)
    side.wait_stream(main)
    with side:
        loss = (weight * values).sum()
    main.wait_stream(side)
    loss.backward()
    assert weight.grad is not None
    weight.grad.add_(1.0)
    side.wait_stream(main)  # the gradient's memory belongs to the stream of forward


RIGHT: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        wait_for_both_streams, read_on_both_streams, use_different_parts, wait_for_the_host,
        wait_for_an_event, free_with_record_stream, free_after_the_wait, free_before_the_wait,
        read_pinned_after_the_event, read_pinned_after_a_value, free_pinned_at_once,
        copy_between_devices, backward_on_the_stream_of_forward,
    )
}  # fmt: skip


# -- wrong
def read_without_wait() -> None:
    values, main, side = _side()
    with side:
        values.sum()
    main.wait_stream(side)


def write_while_read() -> None:
    values, main, side = _side()
    side.wait_stream(main)
    with side:
        values.sum()
    values.add_(1.0)
    main.wait_stream(side)


def wait_before_the_work() -> None:
    values, main, side = _side()
    side.wait_stream(main)
    event = side.record_event()
    with side:
        values.add_(1.0)
    main.wait_event(event)
    values.sum()
    main.wait_stream(side)


def event_of_another_device() -> None:
    values = torch.ones(SIZE, device="cuda:1")
    target = _pinned()
    target.copy_(values, non_blocking=True)
    torch.accelerator.current_stream(DEVICE).record_event().synchronize()
    target.sum()


def use_memory_of_another_stream() -> None:
    """The stream that was current may still work on what was in the memory before."""
    _, main, side = _side()
    target = torch.empty(SIZE, device=DEVICE)
    with side:
        target.fill_(1.0)
    main.wait_stream(side)


def out_argument() -> None:
    values, main, side = _side()
    side.wait_stream(main)
    target = torch.empty(SIZE, device=DEVICE)
    torch.add(values, 1.0, out=target)
    with side:
        torch.add(values, 2.0, out=target)
    main.wait_stream(side)


def free_while_read() -> None:
    values, main, side = _side()
    side.wait_stream(main)
    with side:
        values.sum()
    del values
    torch.empty(SIZE, device=DEVICE)


def shrink_while_read() -> None:
    values, main, side = _side()
    side.wait_stream(main)
    with side:
        total = values.sum()
    values.untyped_storage().resize_(0)
    torch.empty(SIZE, device=DEVICE)
    main.wait_stream(side)
    del total


def read_pinned_without_wait() -> None:
    values, _, _ = _side()
    target = _pinned()
    target.copy_(values, non_blocking=True)
    target.sum()


def list_pinned_without_wait() -> None:
    values, _, _ = _side()
    target = _pinned()
    target.copy_(values, non_blocking=True)
    target.tolist()


def fill_pinned_that_is_copied() -> None:
    source = _pinned()
    target = torch.empty(SIZE, device=DEVICE)
    target.copy_(source, non_blocking=True)
    source.fill_(1.0)


#: Function → kind of its finding.
WRONG: dict[Callable[[], None], str] = {
    read_without_wait: "missing wait",
    write_while_read: "missing wait",
    wait_before_the_work: "missing wait",
    event_of_another_device: "pinned memory used too early by the host",
    use_memory_of_another_stream: "missing wait",
    out_argument: "missing wait",
    free_while_read: "freed too early",
    shrink_while_read: "freed too early",
    read_pinned_without_wait: "pinned memory used too early by the host",
    list_pinned_without_wait: "pinned memory used too early by the host",
    fill_pinned_that_is_copied: "pinned memory used too early by the host",
}


# -- of Paceline, in which faults are planted
def copy_from_second_device() -> None:
    """The current device is the first one."""
    HostCopy(torch.arange(3.0, device="cuda:1")).read().tolist()


def stage_and_write() -> None:
    values = torch.arange(4.0, device=DEVICE)
    copies = StagingBuffer(DEVICE).copy([TensorShard("weight", values, (4,), (0,))])
    for copy in copies:
        copy.tensor.numpy()


#: Planted fault → the program.
PROGRAMS: dict[str, Callable[[], None]] = {
    "the event of a copy to the host is on the current device's stream": copy_from_second_device,
    "a checkpoint is written while it is copied": stage_and_write,
}
