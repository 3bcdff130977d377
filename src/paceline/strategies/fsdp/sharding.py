"""Shard a module over a group of ranks with FSDP2. Used by `zero2`, `zero3` and `hybrid`."""

import math
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from paceline.core.errors import ConfigError
from paceline.distributed import torch_compat
from paceline.distributed.communicator import Communicator
from paceline.models.blocks import BATCH_NORMS, find_blocks, find_ends
from paceline.models.weights.load import convert_weights, final_dtype
from paceline.parallel.buckets.gradients import squared_norm_of
from paceline.parallel.gradients import batch_norm_parameters, changing_buffers
from paceline.parallel.initial_weights import sync_weights
from paceline.parallel.state import (
    TensorShard,
    all_buffers,
    local_tensor,
    persistent_buffers,
    storage_bytes,
    trained_parameters,
)
from paceline.strategies.fsdp.cost import shard_dim

_MESSAGE_BYTES = 64 << 20


@dataclass(frozen=True)
class OwnUnits:
    """Modules whose parameters are sharded over another group of ranks than the rest of the model,
    without replicas.

    Args:
        modules: the modules, each a unit of its own. Their values differ between groups.
        group: the ranks that hold the same parameters.
    """

    modules: tuple[nn.Module, ...]
    group: Communicator


@dataclass
class ShardedParam:
    """This rank's part of a trained parameter.

    Args:
        name: name of the parameter in the module passed to :class:`FSDPSharding`.
        parameter: the DTensor that FSDP manages, or the parameter itself if it is a scalar.
        values: plain parameter that shares memory with the local values. Its ``grad`` is set by
            :meth:`FSDPSharding.end_step`.
        shape: shape of the full parameter.
        offset: start of the local values in the full parameter, one number per dimension.
        is_sharded: False if every rank of the group holds the full parameter.
    """

    name: str
    parameter: nn.Parameter
    values: nn.Parameter
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    is_sharded: bool


class FSDPSharding:
    """Shards parameters, gradients and optimizer state of ``model`` along the axes "shard" and
    "context" of ``world``, with replicas along the axis "data". The ranks of a context group have
    parts of the same rows, so their gradients are summed like gradients of different rows.

    The parameters are plain tensors; they may be slices of a tensor-parallel model. The constructor
    is a collective.

    A step is :meth:`begin_step`, any number of forward and backward passes through the module, and
    :meth:`end_step`, which sets the gradients of :attr:`pieces`. FSDP gathers weights and
    reduce-scatters the gradients in each pass; call :meth:`prepare_last_backward` before the last.

    With replicas (hybrid sharding, HSDP), the mesh has two dimensions: each rank accumulates the
    results of its shard's reduce-scatters, and the last backward all-reduces them over the
    replicas, block by block, while it computes the gradients of the next block. Both reductions are
    then in float32 in any case, because the sum over micro-batches has their dtype.

    Modules are sharded unit by unit: each block, the embedding, the head with the last norm, and
    the root, which has all other parameters, such as an embedding with which the head shares its
    weight. So in each forward a block must be run by every rank of the group (with replicas: of all
    groups) or by none. A block that runs twice in a forward computes correct results, but is
    gathered and reduced twice, which the cost model does not include.

    The head and the root stay gathered from forward to backward in stage 3 too, because backward
    begins with them.

    The gradients of frozen parameters are never reduced. In stage 2 every rank holds these
    parameters in full, because they would stay gathered anyway. In stage 3 they are sharded and
    gathered like the others.

    Args:
        model: module on the CPU or on the rank's device. It is changed in place, and moved to the
            device one block at a time. The first rank's values are used.
        low_dtype: dtype in which weights are gathered and gradients are computed; None for the
            dtype of the parameters.
        reduces_in_float32: whether gradients in ``low_dtype`` are reduced in float32 without
            replicas too.
        reshard_after_forward: True frees the gathered weights of blocks and embedding after
            forward, and all after backward (ZeRO stage 3). False keeps them until the last backward
            or :meth:`end_step` (stage 2).
        offload: whether to keep shards, gradients and optimizer state in host memory.
        blocks: modules that are gathered one at a time; default: the result of
            :func:`~paceline.models.blocks.find_blocks`.
        own: modules that are sharded over other ranks, such as experts; None if there are none. The
            values of the model are then the same already on the ranks that hold them.

    Raises:
        ConfigError: if the trained parameters have several dtypes.
    """

    def __init__(
        self,
        model: nn.Module,
        world: Communicator,
        *,
        low_dtype: torch.dtype | None = None,
        reduces_in_float32: bool = True,
        reshard_after_forward: bool = True,
        offload: bool = False,
        blocks: list[nn.Module] | None = None,
        own: OwnUnits | None = None,
    ) -> None:
        self.model = model
        self._own = own
        self._own_names = _names_in(model, () if own is None else own.modules)
        self.shards = world.subgroup("shard", "context")
        self.copies = world.subgroup("data")
        self.replicas = world.subgroup("data", "shard", "context")
        self.keeps_weights, self.low_dtype = not reshard_after_forward, low_dtype
        #: Whether each unit frees its gathered weights after forward.
        self.frees_after_forward: list[bool] = []
        self._reduces_in_float32 = reduces_in_float32 or self.copies.size > 1
        #: Peak bytes of gathered weights between a forward and its backward, in stage 2.
        self.gathered_bytes = 0
        _check_dtypes(model)
        if own is None:
            sync_weights(model, self.replicas)
        self.changing_buffers = changing_buffers(model) if self.replicas.size > 1 else []
        self._persistent = list(persistent_buffers(model))
        self._shapes = {
            name: tuple(parameter.shape) for name, parameter in model.named_parameters()
        }
        norm_parameters = batch_norm_parameters(model)
        #: Parameters that FSDP does not manage: scalars, and in stage 2 frozen ones.
        self._unmanaged = {
            parameter
            for parameter in model.parameters()
            if parameter.dim() == 0 or (self.keeps_weights and not parameter.requires_grad)
        }
        convert_weights(self._unmanaged)
        for parameter in self._unmanaged:  # FSDP moves the others
            # FSDP would gather a float32 weight in low precision, so it is stored in low precision.
            is_low = (
                low_dtype is not None
                and parameter.dtype == torch.float32
                and parameter.dim() > 0
                and parameter not in norm_parameters
            )
            parameter.data = parameter.data.to(world.device, dtype=low_dtype if is_low else None)
        self.units = self._fully_shard(low_dtype, offload, blocks)
        self._managed = [
            parameter for parameter in model.parameters() if parameter not in self._unmanaged
        ]
        self.pieces = [
            self._shard_of(name, parameter) for name, parameter in trained_parameters(model).items()
        ]
        #: The parameters that the optimizer updates: all trained parameters, even if this rank
        #: holds none of their elements.
        self.trained = {piece.name: piece.values for piece in self.pieces}

    def _fully_shard(
        self, low_dtype: torch.dtype | None, offload: bool, blocks: list[nn.Module] | None
    ) -> list[FSDPModule]:
        """Apply FSDP to the blocks and the ends of the model, and then to the root, which also
        takes the parameters that a block shares with the rest of the model.

        Returns:
            A module of each unit.
        """
        mixed = MixedPrecisionPolicy(
            param_dtype=low_dtype,
            reduce_dtype=self._reduce_dtype(low_dtype),
            cast_forward_inputs=False,
        )
        unchanged = MixedPrecisionPolicy(cast_forward_inputs=False)
        # Normalization layers with float32 running statistics need float32 weights.
        norms: list[nn.Module] = [
            module
            for module in self.model.modules()
            if low_dtype is not None
            and isinstance(module, BATCH_NORMS)
            and any(True for _ in module.parameters(recurse=False))
        ]
        if blocks is None:
            blocks = [block for _, block in find_blocks(self.model)]
        modules = [unit for block in blocks for unit in _callable(block) if unit not in norms]
        embedding, head = self._ends()
        own = [] if self._own is None else list(self._own.modules)
        on_host = CPUOffloadPolicy(pin_memory=self.shards.device.type != "cpu")
        mesh, own_mesh = self._make_mesh(), self._make_own_mesh()
        shard = partial(
            fully_shard,
            offload_policy=on_host if offload else OffloadPolicy(),
            ignored_params=self._unmanaged or None,
        )
        separate = _separate(self.model, [*norms, *modules], self._unmanaged)
        units: list[FSDPModule] = []
        # Inner units come first.
        separate = [*own, *(module for module in separate if module not in own)]
        for unit in [*([module] for module in separate), embedding, head, [self.model]]:
            if not unit:
                continue
            # The weights of one unit at a time are in memory in full.
            convert_weights(weight for module in unit for weight in module.parameters())
            # Backward begins with the head and the root.
            is_last = unit[0] is self.model or unit is head
            is_own = self._own is not None and unit[0] in own
            frees = not (self.keeps_weights or is_last)
            self.frees_after_forward.append(frees)
            group = self._own.group if self._own is not None and is_own else self.shards
            shard(
                unit if len(unit) > 1 else unit[0],
                mesh=own_mesh if is_own else mesh,
                shard_placement_fn=partial(_placement, group.size),
                mp_policy=unchanged if unit[0] in norms else mixed,
                reshard_after_forward=frees,
            )
            first = unit[0]  # the modules of a unit share its state
            assert isinstance(first, FSDPModule)
            # Gradients are summed, not averaged: the loss is already divided by the global count.
            first.set_gradient_divide_factor(1.0)
            first.set_force_sum_reduction_for_comms(True)
            if unit is embedding:
                # Nothing is left to gather in backward. By default, FSDP prefetches the unit that
                # ran before: the head, if a forward without gradients came first.
                first.set_modules_to_backward_prefetch([first])
            units.append(first)
        root = units[-1]
        root.set_reshard_after_backward(not self.keeps_weights)
        self._frees_in_backward = not self.keeps_weights
        # The parameters that a batch uses may differ between ranks.
        torch_compat.reduce_unused_parameters(self.model)
        return units

    def _ends(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Return the embedding, and the last norm with the head: of these modules, those that have
        parameters to shard."""
        ends = find_ends(self.model)
        embedding, head = (
            [
                module
                for module in map(self.model.get_submodule, names)
                if any(parameter not in self._unmanaged for parameter in module.parameters())
            ]
            for names in ((ends.embedding,) if ends.embedding else (), ends.head)
        )
        return embedding, head

    def _reduce_dtype(self, low_dtype: torch.dtype | None) -> torch.dtype | None:
        """Return the dtype in which gradients are reduced, or None for the dtype of the
        gradients."""
        return torch.float32 if low_dtype is not None and self._reduces_in_float32 else low_dtype

    def _make_mesh(self) -> DeviceMesh:
        """Return a mesh of the shard group, or of replicas × shards."""
        device_type, shard_group = self.shards.device.type, _group(self.shards)
        if self.copies.size == 1:
            return DeviceMesh.from_group(shard_group, device_type, mesh_dim_names=("shard",))
        members, size = self.replicas.ranks, self.shards.size
        ranks = [members[start : start + size] for start in range(0, len(members), size)]
        return DeviceMesh.from_group(
            [_group(self.copies), shard_group],
            device_type,
            mesh=ranks,
            mesh_dim_names=("replicate", "shard"),
        )

    def _make_own_mesh(self) -> DeviceMesh | None:
        """Return the mesh of the modules that are sharded over other ranks."""
        if self._own is None:
            return None
        group, device_type = _group(self._own.group), self.shards.device.type
        return DeviceMesh.from_group(group, device_type, mesh_dim_names=("shard",))

    def _shard_of(self, name: str, parameter: nn.Parameter) -> ShardedParam:
        if parameter in self._unmanaged:
            return ShardedParam(name, parameter, parameter, (), (), is_sharded=False)
        shape, group = self._shapes[name], self.shards
        if self._own is not None and name in self._own_names:
            group = self._own.group
        shard = shard_dim(shape, group.size)
        begin = min(shape[shard], math.ceil(shape[shard] / group.size) * group.rank)
        offset = tuple(begin if dim == shard else 0 for dim in range(len(shape)))
        values = nn.Parameter(local_tensor(parameter.detach()))
        return ShardedParam(name, parameter, values, shape, offset, is_sharded=True)

    # -- a step
    def begin_step(self) -> None:
        """Discard the gradients of the last step."""
        self._prepare_backward(is_last=False)
        for piece in self.pieces:
            piece.parameter.grad = None
            piece.values.grad = None

    def prepare_last_backward(self) -> None:
        """Prepare for the last backward of a step.

        That backward frees the weights of each block once they are no longer needed, so that they
        are not in memory together with all gradients. It also all-reduces the gradients of each
        block over the replicas.
        """
        self._prepare_backward(is_last=True)

    def note_gathered(self) -> None:
        """Record how many bytes are gathered now, between a forward and its backward."""
        gathered = [
            parameter
            for parameter in self.model.parameters()
            if not isinstance(parameter, DTensor) and parameter not in self._unmanaged
        ]
        self.gathered_bytes = max(self.gathered_bytes, storage_bytes(gathered))

    def _prepare_backward(self, is_last: bool) -> None:
        frees = is_last or not self.keeps_weights
        if frees != self._frees_in_backward:
            self.units[-1].set_reshard_after_backward(frees)
            self._frees_in_backward = frees
        if self.copies.size > 1:
            self.units[-1].set_requires_all_reduce(is_last)

    def end_step(self) -> None:
        """Free gathered weights and set the gradients of :attr:`pieces` to the sums over all ranks.
        Parameters that no batch used get a gradient of zero."""
        self.reshard()
        for piece in self.pieces:
            gradient = piece.parameter.grad
            piece.values.grad = (
                torch.zeros_like(piece.values) if gradient is None else local_tensor(gradient)
            )
        unsharded = [_gradient(piece) for piece in self.pieces if not piece.is_sharded]
        _sum_packed(unsharded, self.replicas)
        self.replicas.broadcast(self.changing_buffers)

    def reshard(self) -> None:
        """Free gathered weights, for example after an evaluation or after loading a checkpoint."""
        for unit in self.units:
            unit.reshard()

    def squared_norm(self, names: Container[str] | None = None) -> torch.Tensor:
        """Return this rank's part of the squared 2-norm of the gradients, to be summed over the
        shards.

        It is a scalar on the device, of its widest floating-point dtype. Each element is counted on
        exactly one rank of the group.

        Args:
            names: names of the parameters to include; default: all.
        """
        gradients = [
            _gradient(piece)
            for piece in self.pieces
            if (piece.is_sharded or self.shards.is_rank_zero)
            and (names is None or piece.name in names)
        ]
        return squared_norm_of(
            [gradient for gradient in gradients if gradient.numel()], self.shards.device
        )

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply the gradients by ``factor``, a scalar tensor."""
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for piece in self.pieces:
            by_device.setdefault(piece.values.device, []).append(_gradient(piece))
        for device, gradients in by_device.items():
            torch_compat.foreach_mul_(gradients, factor.to(device))

    # -- state
    def tensor_shards(self) -> Iterator[TensorShard]:
        for piece in self.pieces:
            owned = self.copies.is_rank_zero if piece.is_sharded else self.replicas.is_rank_zero
            owned = owned or piece.name in self._own_names
            yield TensorShard(
                piece.name, piece.values, piece.shape, piece.offset, key=piece.values, owned=owned
            )
        buffers = dict(self.model.named_buffers())
        for name in self._persistent:
            yield TensorShard.full(name, buffers[name], owned=self.replicas.is_rank_zero)

    def memory_tensors(self) -> list[torch.Tensor]:
        """Return all shards, including frozen ones, buffers and gradients, but no gathered
        weights."""
        gradients = [piece.values.grad for piece in self.pieces if piece.values.grad is not None]
        return [*self._managed, *self._unmanaged, *all_buffers(self.model), *gradients]


def _names_in(model: nn.Module, modules: Iterable[nn.Module]) -> frozenset[str]:
    """Return the names of the parameters within some modules of a model."""
    inside = {parameter for module in modules for parameter in module.parameters()}
    return frozenset(name for name, each in model.named_parameters() if each in inside)


def _placement(size: int, parameter: nn.Parameter) -> Shard:
    return Shard(shard_dim(tuple(parameter.shape), size))


def _gradient(piece: ShardedParam) -> torch.Tensor:
    assert piece.values.grad is not None
    return piece.values.grad


def _group(comm: Communicator) -> dist.ProcessGroup:
    """Return the process group of ``comm``. With one rank, create a group."""
    if comm.size == 1:
        if not dist.is_initialized():
            backend = dist.get_default_backend_for_device(comm.device)
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    else:
        group = comm.group if comm.group is not None else dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    return group


def _check_dtypes(model: nn.Module) -> None:
    dtypes = {final_dtype(parameter) for parameter in trained_parameters(model).values()}
    if len(dtypes) > 1:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ConfigError(
            "sharding is not supported with {kind}: its trained parameters have several dtypes"
            " ({names}), and a shard packs them together",
            code="mixed-dtypes",
            allowed="one dtype, preferably float32: `precision: bf16-mixed` casts in the forward",
            fix="cast the model with .float(), or set `parallel.mode: zero1` or `ddp`",
            kind=type(model).__name__,
            names=names,
        )


def _callable(block: nn.Module) -> Iterable[nn.Module]:
    """Return the block, or its entries if it is a list of modules, which is never called itself."""
    if isinstance(block, nn.ModuleList | nn.ModuleDict):
        for child in block.children():
            yield from _callable(child)
    else:
        yield block


def _separate(
    model: nn.Module, candidates: list[nn.Module], unmanaged: Container[nn.Parameter]
) -> list[nn.Module]:
    """Return the candidates that have parameters to shard and share none of them with the rest of
    the model."""
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(module)
    separate: list[nn.Module] = []
    for module in candidates:
        inside = set(module.modules())
        managed = [parameter for parameter in module.parameters() if parameter not in unmanaged]
        owns_all = bool(managed) and all(owners[parameter] <= inside for parameter in managed)
        if owns_all and module is not model and module not in separate:
            separate.append(module)
    return separate


def _sum_packed(tensors: list[torch.Tensor], comm: Communicator) -> None:
    """Sum tensors over a group of ranks, in place, packed into few messages."""
    if comm.size == 1:
        return
    group: list[torch.Tensor] = []
    size = 0
    for number, tensor in enumerate(tensors):
        group.append(tensor)
        size += tensor.numel() * tensor.element_size()
        if size >= _MESSAGE_BYTES or number == len(tensors) - 1:
            flat = torch.cat([member.reshape(-1) for member in group]).to(comm.device)
            comm.wait(comm.all_reduce(flat))
            parts = flat.split([member.numel() for member in group])
            for member, part in zip(group, parts, strict=True):
                member.copy_(part.view(member.shape))
            group, size = [], 0
