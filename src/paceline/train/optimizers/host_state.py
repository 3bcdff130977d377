"""Keep the state of an optimizer in host memory (`cpu_offload: optimizer`).

A step copies the state of some parameters at a time to the device, updates them there, and copies
it back, while the state of the next ones is on its way. So the updates have the same bits as
without offloading, and the state of about two groups of parameters is on the device at a time.
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import torch

from paceline.distributed.host_copies import CopyStream, empty_on_host
from paceline.models.shape.record import OFFLOAD_MINIMUM, OFFLOADED_AT_ONCE
from paceline.parallel.strategy import Strategy

#: A tensor of a parameter's state: the parameter, the key, and the tensor on the device.
_Entry = tuple[torch.Tensor, str, torch.Tensor]
#: Tensors and numbers by parameter and key.
OptimizerState = Mapping[torch.Tensor, dict[str, torch.Tensor | float]]


class HostState(torch.optim.Optimizer):
    """Added in front of the class of an optimizer by :func:`keep_state_on_host`. The optimizer
    updates each parameter from its own gradient and state only."""

    #: Where a checkpoint's state is loaded to.
    state_device: torch.device
    _copies: "_Copies"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters, some at a time."""
        assert closure is None
        groups = self.param_groups
        params = [group["params"] for group in groups]
        chunks = [(group, chunk) for group in groups for chunk in _chunks(group["params"])]
        copies, state = self._copies, self.state
        # Some optimizers consist of others, which share the groups.
        for group in groups:
            group["params"] = []
        try:
            for index, (group, chunk) in enumerate(chunks):
                if index == 0:
                    copies.fetch(chunk, state)
                copies.wait_for_fetch()
                copies.wait_for_store()
                if index + 1 < len(chunks):
                    copies.fetch(chunks[index + 1][1], state)
                self.param_groups, group["params"] = [group], chunk
                super().step()
                group["params"] = []
                copies.store(chunk, state)
        finally:
            copies.finish(synchronize=True)
            self.param_groups = groups
            for group, values in zip(groups, params, strict=True):
                group["params"] = values


class _Copies:
    """Copies the state of parameters of one device from and to host memory, which is allocated
    once."""

    def __init__(self, device: torch.device) -> None:
        self._to_device, self._to_host = CopyStream(device), CopyStream(device)
        self._on_host: dict[tuple[torch.Tensor, str], torch.Tensor] = {}
        self._fetching: tuple[list[_Entry], torch.Event | None] | None = None
        self._storing: tuple[list[torch.Tensor], torch.Event | None] | None = None

    def fetch(self, params: list[torch.Tensor], state: OptimizerState) -> None:
        """Start to copy the state of parameters to their device."""
        entries = []
        for param in params:
            for key, value in state.get(param, {}).items():
                if _has_elements(value) and value.device != param.device:
                    target = torch.empty_like(value, device=param.device)
                    self._to_device.copy(value, target)
                    entries.append((param, key, target))
        for param, key, target in entries:
            state[param][key] = target
        self._fetching = entries, self._to_device.mark()

    def wait_for_fetch(self) -> None:
        """Let the device wait for what is on its way to it."""
        if self._fetching is not None:
            self._to_device.wait(self._fetching[1])
        self._fetching = None

    def store(self, params: list[torch.Tensor], state: OptimizerState) -> None:
        """Start to copy the state of parameters to the host."""
        sources = []
        for param in params:
            if param.numel() < OFFLOAD_MINIMUM:
                continue
            for key, value in state.get(param, {}).items():
                if _has_elements(value) and value.device == param.device:
                    target = self._on_host.get((param, key))
                    if target is None:
                        target = self._on_host[param, key] = empty_on_host(value)
                    self._to_host.copy(value, target)
                    state[param][key] = target
                    sources.append(value)
        self._storing = sources, self._to_host.mark()

    def wait_for_store(self, synchronize: bool = False) -> None:
        """Let the device, or this thread, wait for what is on its way to the host."""
        if self._storing is None:
            return
        event = self._storing[1]
        if synchronize and event is not None:
            event.synchronize()  # the state may be saved next
        self._to_host.wait(event)
        self._storing = None

    def finish(self, synchronize: bool) -> None:
        """Wait for all copies."""
        self.wait_for_fetch()
        self.wait_for_store(synchronize)


def offload_state(optimizer: torch.optim.Optimizer, strategy: Strategy) -> None:
    """With ``cpu_offload: optimizer``, make the optimizer keep its state in host memory between its
    steps, unless the strategy does so itself."""
    offload = strategy.config.parallel.state_offload
    if offload == "optimizer" and not strategy.keeps_state_on_host:
        keep_state_on_host(optimizer)


def keep_state_on_host(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer keep its state in host memory between its steps."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    cls = type(optimizer)
    optimizer.__class__ = type(f"HostState{cls.__name__}", (HostState, cls), {})
    assert isinstance(optimizer, HostState)
    optimizer.state_device = torch.device("cpu")
    optimizer._copies = _Copies(params[0].device)
    # Some optimizers create their state in advance.
    optimizer._copies.store(params, optimizer.state)
    optimizer._copies.finish(synchronize=True)


def _has_elements(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _chunks(params: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the parameters in groups of a limited number of elements, or of one parameter."""
    chunk: list[torch.Tensor] = []
    count = 0
    for param in params:
        if chunk and count + param.numel() > OFFLOADED_AT_ONCE:
            yield chunk
            chunk, count = [], 0
        chunk.append(param)
        count += param.numel()
    if chunk:
        yield chunk
