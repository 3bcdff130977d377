"""Activation offloading: what a block saves for backward is kept in host memory meanwhile.

While a block runs forward, what the block before it saved is copied to the host; while a block runs
backward, what the block before it needs is copied back. The last block's activations stay on the
device, because backward begins with them. So the activations of about two blocks are on the device
at a time.
"""

import weakref
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.config.schema import Config
from paceline.config.schema.parallel import Parallel
from paceline.core.errors import ConfigError
from paceline.distributed import torch_compat
from paceline.distributed.host_copies import CopyStream, empty_on_host
from paceline.models.blocks import wrap_forward
from paceline.models.transforms.activation_checkpointing import (
    checkpoint_activations,
    recomputable_blocks,
)

#: Smaller storages stay on the device: to start a copy takes longer than to make it.
MIN_STORAGE_BYTES = 4096


def reduce_activations(model: nn.Module, config: Config) -> None:
    """Reduce what the blocks keep on the device for backward: apply activation checkpointing, and
    around it activation offloading.

    Raises:
        ConfigError: if the model has no blocks.
    """
    checkpoint_activations(model, config.train_args.recomputation)
    offload_activations(model, config.parallel)


def offload_activations(model: nn.Module, settings: Parallel) -> "ActivationOffloader | None":
    """With ``cpu_offload: activations``, keep the saved tensors of the blocks that activation
    checkpointing could recompute in host memory between forward and backward. Losses and gradients
    do not change.

    Call it after activation checkpointing. Of a block that is recomputed, only its inputs are
    saved, and these are offloaded.

    Raises:
        ConfigError: if the model has no blocks.
    """
    if not settings.offloads_activations:
        return None
    blocks = recomputable_blocks(model)
    if not blocks:
        raise ConfigError(
            "`parallel.cpu_offload: activations` is not supported with {kind}: it has no"
            " ModuleList or Sequential whose activations could be offloaded",
            code="no-blocks-to-offload",
            fix="leave `activations` out of `parallel.cpu_offload`",
            kind=type(model).__name__,
        )
    offloader = ActivationOffloader()
    for index, block in enumerate(blocks):
        is_last = index == len(blocks) - 1
        wrap_forward(block, partial(offloader.run, block, index == 0, is_last))
    return offloader


class _Activation:
    """A storage that backward reads, as a flat tensor on the device or in host memory. It exists as
    long as autograd has a tensor in it."""

    def __init__(self, on_host: torch.Tensor, device: torch.device) -> None:
        self.on_host: torch.Tensor | None = on_host
        self.on_device: torch.Tensor | None = None
        self.device = device


class _BlockRun:
    """One forward pass of a block. ``previous`` is the forward pass of the block before it."""

    def __init__(self, previous: "_BlockRun | None") -> None:
        self.previous = None if previous is None else weakref.ref(previous)
        self.activations: list[weakref.ref[_Activation]] = []
        self.by_storage: dict[Hashable, _Activation] = {}
        #: Tensors that are being copied to the host, until ``copied``.
        self.sources: list[torch.Tensor] = []
        self.copied: torch.Event | None = None
        self.is_fetched = False


class _Saved:
    """A saved tensor of a block: a view of an activation, or a tensor that stays where it is."""

    def __init__(
        self, run: _BlockRun, tensor: torch.Tensor, activation: _Activation | None
    ) -> None:
        self.run, self.activation = run, activation
        self.tensor = tensor if activation is None else None
        self.view = (tensor.shape, tensor.stride(), tensor.storage_offset())


class ActivationOffloader:
    """Offloads the saved tensors of the blocks of a model.

    A storage is copied once per block, even if several operations save tensors in it. Parameters,
    low-precision copies of them, further inputs of a block without gradient (masks and rotary
    embeddings, which all blocks share) and small storages are not offloaded.
    """

    def __init__(self) -> None:
        #: Bytes that were copied to the host.
        self.offloaded_bytes = 0
        self._latest: _BlockRun | None = None
        self._streams: dict[torch.device, CopyStream] = {}
        # Tensors that are being copied to the device, and the event after the copies.
        self._incoming: tuple[_BlockRun, list[torch.Tensor], torch.Event | None] | None = None
        self._stream: CopyStream | None = None

    def run(
        self,
        block: nn.Module,
        is_first: bool,
        is_last: bool,
        forward: Callable[..., Any],
        *args: Any,
        **inputs: Any,
    ) -> Any:
        """Run the forward of a block."""
        if not torch.is_grad_enabled():
            return forward(*args, **inputs)
        previous = None if is_first else self._latest
        run = _BlockRun(previous)
        weights = list(block.parameters())
        shared = [
            leaf
            for leaf in torch_compat.tree_leaves((args[1:], inputs))
            if isinstance(leaf, torch.Tensor) and not leaf.requires_grad
        ]
        pack = partial(
            self._pack,
            run,
            None if is_last else {tensor.untyped_storage() for tensor in (*weights, *shared)},
            {tuple(reversed(weight.shape)) for weight in weights if weight.dim() == 2},
        )
        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            result = forward(*args, **inputs)
        run.by_storage.clear()
        if run.sources and self._stream is not None:
            run.copied = self._stream.mark()
        if previous is not None and previous.sources:
            # From here on, the memory of the previous block's activations is used for others.
            assert self._stream is not None
            self._stream.wait(previous.copied)
            previous.sources.clear()
        self._latest = None if is_last else run
        return result

    def _pack(
        self,
        run: _BlockRun,
        stay: set[torch.UntypedStorage] | None,
        transposed: set[tuple[int, ...]],
        tensor: torch.Tensor,
    ) -> _Saved:
        if stay is None or not _is_offloadable(tensor, transposed):
            return _Saved(run, tensor, None)
        storage = tensor.untyped_storage()
        if storage in stay:
            return _Saved(run, tensor, None)
        # Autograd would not accept that a saved tensor is changed in place, so a storage of one
        # version has one content.
        key = (storage, torch_compat.tensor_version(tensor), tensor.dtype)
        activation = run.by_storage.get(key)
        if activation is None:
            activation = run.by_storage[key] = self._offload(run, tensor, storage.nbytes())
        return _Saved(run, tensor, activation)

    def _offload(self, run: _BlockRun, tensor: torch.Tensor, size_bytes: int) -> _Activation:
        source = tensor.detach().as_strided((size_bytes // tensor.itemsize,), (1,), 0)
        activation = _Activation(empty_on_host(source), tensor.device)
        assert activation.on_host is not None
        if self._stream is None:
            self._stream = CopyStream(tensor.device)
        self._stream.copy(source, activation.on_host)
        run.sources.append(source)
        run.activations.append(weakref.ref(activation))
        self.offloaded_bytes += size_bytes
        return activation

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        self._fetch(saved.run)
        if self._incoming is not None and self._incoming[0] is saved.run:
            self._finish_incoming()
            reference = saved.run.previous
            previous = None if reference is None else reference()
            if previous is not None:
                self._fetch(previous)
        if saved.tensor is not None:
            return saved.tensor
        assert saved.activation is not None
        assert saved.activation.on_device is not None
        return saved.activation.on_device.as_strided(*saved.view)

    def _fetch(self, run: _BlockRun) -> None:
        """Start to copy the activations of a block to the device, unless it was done before."""
        if run.is_fetched:
            return
        run.is_fetched = True
        self._finish_incoming()
        incoming = []
        for reference in run.activations:
            activation = reference()
            if activation is None or activation.on_host is None:
                continue  # autograd does not need it any more
            assert self._stream is not None
            # Allocated in the current stream, because its kernels use and free it.
            target = torch.empty_like(activation.on_host, device=activation.device)
            self._stream.copy(activation.on_host, target)
            activation.on_device, activation.on_host = target, None
            incoming.append(target)
        event = None if self._stream is None else self._stream.mark()
        self._incoming = run, incoming, event

    def _finish_incoming(self) -> None:
        """Let the device wait for the copies to it."""
        if self._incoming is not None and self._stream is not None:
            self._stream.wait(self._incoming[2])
        self._incoming = None


def _is_offloadable(tensor: torch.Tensor, transposed: set[tuple[int, ...]]) -> bool:
    """Return whether a saved tensor is a plain one of sufficient size, and not a low-precision copy
    of a weight, which autocast keeps until the end of forward.

    Args:
        transposed: transposed shapes of the matrices of the block.
    """
    if hasattr(tensor, "__tensor_flatten__") or tensor.layout != torch.strided:
        return False
    size_bytes = tensor.untyped_storage().nbytes()
    if size_bytes < MIN_STORAGE_BYTES or size_bytes % tensor.itemsize:
        return False
    if tensor.is_conj() or tensor.is_neg():
        return False
    is_copy = torch.is_autocast_enabled(tensor.device.type) and tensor.dim() == 2
    return not (is_copy and tensor.stride(0) == 1 and tuple(tensor.shape) in transposed)
