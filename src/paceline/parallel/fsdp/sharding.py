"""A module cut into shards over a line of ranks by FSDP2: the component that `zero2`, `zero3` and
the hybrids share."""

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
from paceline.models.blocks import BATCH_NORMS, find_blocks
from paceline.parallel.base import persistent_buffers
from paceline.parallel.ddp.buckets import squared_norm_of
from paceline.parallel.fsdp.cost import shard_dim
from paceline.parallel.gradients import batch_norm_parameters, changing_buffers
from paceline.parallel.state import TensorShard, local_tensor, storage_bytes

_MESSAGE_BYTES = 64 << 20


def reduce_dtype(low_dtype: torch.dtype | None, num_replicas: int) -> torch.dtype | None:
    """The dtype in which gradients are reduced; None: their own."""
    return torch.float32 if low_dtype is not None and num_replicas > 1 else low_dtype


@dataclass
class ShardedParam:
    """A trained parameter as this rank holds it.

    Args:
        name: in the module given to :class:`FSDPSharding`.
        parameter: what FSDP manages (a DTensor), or, with no dimension to cut, the parameter
            itself.
        values: the local values, live, as a plain parameter; its ``grad`` is set by
            :meth:`FSDPSharding.end_step`.
        shape: before the cut.
        offset: where the local values begin.
        cut: False where every rank of the line holds the whole.
    """

    name: str
    parameter: nn.Parameter
    values: nn.Parameter
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    cut: bool


class FSDPSharding:
    """Parameters, gradients and optimizer state of ``model`` cut over the line of ``world`` along
    the axis "shard", and repeated along the axis "data". Its parameters may be parts of a
    tensor-parallel model already: plain tensors.

    A step is :meth:`begin_step`, any number of forward and backward passes through the module (FSDP
    gathers weights and reduce-scatters the sum of the gradients in each;
    :meth:`prepare_last_backward` before the last), :meth:`end_step`; then :attr:`pieces` have their
    gradients. A collective: every rank of the world makes one, at the same place.

    With replicas (hybrid sharding, HSDP), the mesh has two dimensions: each rank adds up what its
    shard's reduce-scatters give, and the last backward all-reduces that sum over the replicas,
    block by block, while it computes the gradients of the next block. Both reductions are in
    float32 then, because the sum over micro-batches is kept in their dtype.

    Modules are cut block by block, so a block must be run by every rank of the line (with replicas:
    of all lines), or by none, in each forward. A block that runs twice in a forward is right, but
    gathered and reduced twice: more traffic than a cost can know.

    Frozen parameters are never reduced. In stage 2 every rank keeps them whole, as their weights
    would stay gathered anyway, so they are not sent at all after the start; in stage 3 they are
    sharded and gathered like the others.

    Args:
        model: on the CPU or the rank's device; changed in place, one block at a time on the device.
            The first rank's values win.
        low_dtype: in which weights are gathered and, without replicas, gradients summed; None:
            their own.
        reshard_after_forward: True: gathered weights are freed after forward and after backward,
            and gathered again (ZeRO stage 3). False: they stay until the last backward, or
            :meth:`end_step` (stage 2).
        offload: keep shards, their gradients and the optimizer's state in the host's memory.
        blocks: modules that are gathered at a time; those of
            :func:`~paceline.models.blocks.find_blocks` where None.

    Raises:
        ConfigError: trained parameters of several dtypes.
    """

    def __init__(
        self,
        model: nn.Module,
        world: Communicator,
        *,
        low_dtype: torch.dtype | None = None,
        reshard_after_forward: bool = True,
        offload: bool = False,
        blocks: list[nn.Module] | None = None,
    ) -> None:
        self.model = model
        self.shards = world.subgroup("shard")
        self.copies = world.subgroup("data")
        self.replicas = world.subgroup("data", "shard")
        self.keeps_weights = not reshard_after_forward
        #: Most bytes of gathered weights between a forward and its backward, where they stay that
        #: long.
        self.gathered_bytes = 0
        _check_dtypes(model)
        self.replicas.broadcast([*model.parameters(), *model.buffers()])
        self.changing_buffers = changing_buffers(model) if self.replicas.size > 1 else []
        self._persistent = list(persistent_buffers(model))
        self._shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
        norm_parameters = batch_norm_parameters(model)
        #: Parameters that FSDP does not manage: scalars, and in stage 2 frozen ones.
        self._whole = {
            one
            for one in model.parameters()
            if one.dim() == 0 or (self.keeps_weights and not one.requires_grad)
        }
        for one in self._whole:  # FSDP moves what it manages
            # FSDP would gather a float32 weight in the low precision; one that every rank keeps is
            # held in it.
            low = (
                low_dtype is not None
                and one.dtype == torch.float32
                and one.dim() > 0
                and one not in norm_parameters
            )
            one.data = one.data.to(world.device, dtype=low_dtype if low else None)
        self.units = self._cut(low_dtype, offload, blocks)
        self._to_shards = {
            name: one for name, one in model.named_parameters() if one not in self._whole
        }
        self.pieces = [
            self._piece(name, one) for name, one in model.named_parameters() if one.requires_grad
        ]

    def _cut(
        self, low_dtype: torch.dtype | None, offload: bool, blocks: list[nn.Module] | None
    ) -> list[FSDPModule]:
        """Hand the modules to FSDP, the innermost first. What a block shares with the rest of the
        model stays with the root."""
        low = MixedPrecisionPolicy(
            param_dtype=low_dtype,
            reduce_dtype=reduce_dtype(low_dtype, self.copies.size),
            cast_forward_inputs=False,
        )
        own = MixedPrecisionPolicy(cast_forward_inputs=False)
        norms: list[nn.Module] = [] if low_dtype is None else _batch_norms(self.model)
        given = [one for _, one in find_blocks(self.model)] if blocks is None else blocks
        wanted = [*norms, *(one for block in given for one in _callable(block) if one not in norms)]
        size = self.shards.size
        on_host = CPUOffloadPolicy(pin_memory=self.shards.device.type == "cuda")
        shard = partial(
            fully_shard,
            mesh=self._make_mesh(),
            reshard_after_forward=not self.keeps_weights,
            shard_placement_fn=lambda each: Shard(shard_dim(tuple(each.shape), size)),
            offload_policy=on_host if offload else OffloadPolicy(),
            ignored_params=self._whole or None,
        )
        found: list[FSDPModule] = []
        for module in [*_separate(self.model, wanted, self._whole), self.model]:
            shard(module, mp_policy=own if module in norms else low)
            assert isinstance(module, FSDPModule)
            # The sum over ranks, as exact as it comes: the loss is divided by the global count
            # already.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            found.append(module)
        root = found[-1]
        root.set_reshard_after_backward(not self.keeps_weights)
        self._frees_in_backward = not self.keeps_weights
        # Ranks may differ in which parameters a batch reaches; torch before 2.12 has no switch for
        # it. There, a block that the last micro-batch does not reach takes no part in the last
        # backward, so gradients are all-reduced over the replicas in every backward.
        self._defers_all_reduce = hasattr(root, "set_reduce_scatter_unused_params")
        if self._defers_all_reduce:
            root.set_reduce_scatter_unused_params(True)
        return found

    def _make_mesh(self) -> DeviceMesh:
        """The ranks of the line; with replicas, replicas × shards."""
        device_type, shard_group = self.shards.device.type, _group(self.shards)
        if self.copies.size == 1:
            return DeviceMesh.from_group(shard_group, device_type, mesh_dim_names=("shard",))
        ranks = torch.tensor(self.replicas.ranks).view(self.copies.size, self.shards.size)
        return DeviceMesh.from_group(
            [_group(self.copies), shard_group],
            device_type,
            mesh=ranks,
            mesh_dim_names=("replicate", "shard"),
        )

    def _piece(self, name: str, parameter: nn.Parameter) -> ShardedParam:
        if parameter in self._whole:
            return ShardedParam(name, parameter, parameter, (), (), cut=False)
        shape = self._shapes[name]
        dim = shard_dim(shape, self.shards.size)
        begin = min(shape[dim], math.ceil(shape[dim] / self.shards.size) * self.shards.rank)
        offset = tuple(begin if one == dim else 0 for one in range(len(shape)))
        return ShardedParam(
            name, parameter, nn.Parameter(local_tensor(parameter.detach())), shape, offset, cut=True
        )

    # -- a step
    def begin_step(self) -> None:
        self._set_frees_in_backward(not self.keeps_weights)
        self._set_all_reduces(not self._defers_all_reduce)
        for piece in self.pieces:
            piece.parameter.grad = None
            piece.values.grad = None

    def prepare_last_backward(self) -> None:
        """Before the last forward of a step: its backward frees each block's weights when it is
        done with them, so that they do not lie beside all of the gradients, and all-reduces each
        block's gradients over the replicas."""
        self._set_frees_in_backward(True)
        self._set_all_reduces(True)

    def note_gathered(self) -> None:
        """Note how much is gathered now, between a forward and its backward."""
        gathered = [
            one
            for one in self.model.parameters()
            if not isinstance(one, DTensor) and one not in self._whole
        ]
        self.gathered_bytes = max(self.gathered_bytes, storage_bytes(gathered))

    def _set_frees_in_backward(self, frees: bool) -> None:
        if frees != self._frees_in_backward:
            self.units[-1].set_reshard_after_backward(frees)
            self._frees_in_backward = frees

    def _set_all_reduces(self, is_required: bool) -> None:
        if self.copies.size > 1:
            self.units[-1].set_requires_all_reduce(is_required)

    def end_step(self) -> None:
        """Free weights that are gathered still and take over the gradients: their sum over all
        ranks. Parameters that no batch reached have zeros."""
        self.reshard()
        for piece in self.pieces:
            gradient = piece.parameter.grad
            piece.values.grad = (
                torch.zeros_like(piece.values) if gradient is None else local_tensor(gradient)
            )
        _sum_packed([_gradient(piece) for piece in self.pieces if not piece.cut], self.replicas)
        self.replicas.broadcast(self.changing_buffers)

    def reshard(self) -> None:
        """Free gathered weights wherever they are: after an evaluation, after new values were
        written."""
        for unit in self.units:
            unit.reshard()

    def squared_norm(self, among: Container[str] | None = None) -> torch.Tensor:
        """This rank's share of the gradient's squared 2-norm, a wide scalar on the device, to be
        summed over the shards: each element counts on one rank of the line. ``among``: names to
        take; all where None."""
        gradients = [
            _gradient(piece)
            for piece in self.pieces
            if (piece.cut or self.shards.is_rank_zero) and (among is None or piece.name in among)
        ]
        return squared_norm_of([one for one in gradients if one.numel()], self.shards.device)

    def scale(self, factor: torch.Tensor) -> None:
        for device, gradients in _by_device(_gradient(piece) for piece in self.pieces).items():
            torch_compat.foreach_mul_(gradients, factor.to(device))

    # -- what it holds
    def named_pieces(self) -> list[tuple[str, nn.Parameter]]:
        """What the optimizer updates: every trained parameter, also where none of its elements fell
        to this rank."""
        return [(piece.name, piece.values) for piece in self.pieces]

    def tensor_shards(self) -> Iterator[TensorShard]:
        for piece in self.pieces:
            owned = self.copies.is_rank_zero if piece.cut else self.replicas.is_rank_zero
            yield TensorShard(
                piece.name, piece.values, piece.shape, piece.offset, key=piece.values, owned=owned
            )
        buffers = dict(self.model.named_buffers())
        for name in self._persistent:
            yield TensorShard.whole(name, buffers[name], owned=self.replicas.is_rank_zero)

    def memory_tensors(self) -> list[torch.Tensor]:
        """Shards (frozen ones too), buffers and gradients; what is gathered for the moment is
        :attr:`gathered_bytes`."""
        gradients = [piece.values.grad for piece in self.pieces if piece.values.grad is not None]
        return [*self._to_shards.values(), *self._whole, *self.model.buffers(), *gradients]


def _gradient(piece: ShardedParam) -> torch.Tensor:
    assert piece.values.grad is not None
    return piece.values.grad


def _by_device(tensors: Iterable[torch.Tensor]) -> dict[torch.device, list[torch.Tensor]]:
    found: dict[torch.device, list[torch.Tensor]] = {}
    for one in tensors:
        found.setdefault(one.device, []).append(one)
    return found


def _group(line: Communicator) -> dist.ProcessGroup:
    """The process group of a line; one is made for a rank that is alone on it."""
    if line.size == 1:
        if not dist.is_initialized():
            backend = dist.get_default_backend_for_device(line.device)
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        made = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        return made
    group = line.group if line.group is not None else dist.group.WORLD
    assert group is not None
    return group


def _check_dtypes(model: nn.Module) -> None:
    kinds = {one.dtype for one in model.parameters() if one.requires_grad}
    if len(kinds) > 1:
        names = ", ".join(sorted(str(one).removeprefix("torch.") for one in kinds))
        raise ConfigError(
            f"{type(model).__name__} trains parameters of several types ({names}), and sharding"
            " packs them together",
            allowed="one type, best float32: `precision: bf16-mixed` casts for the computation",
            fix="cast the model with .float(), or set `parallel.mode: zero1` or `ddp`",
        )


def _batch_norms(model: nn.Module) -> list[nn.Module]:
    """Batch and instance normalisations with weights: beside float32 running statistics these must
    be float32 too."""
    return [
        one
        for one in model.modules()
        if isinstance(one, BATCH_NORMS) and any(True for _ in one.parameters(recurse=False))
    ]


def _callable(block: nn.Module) -> Iterable[nn.Module]:
    """The block, or, where it is a list, which nobody calls, what stands in it."""
    if isinstance(block, nn.ModuleList | nn.ModuleDict):
        for child in block.children():
            yield from _callable(child)
    else:
        yield block


def _separate(
    model: nn.Module, wanted: list[nn.Module], whole: Container[nn.Parameter]
) -> list[nn.Module]:
    """Return the modules that have parameters to shard, none of which is used elsewhere in the
    model. Parameters in ``whole`` are not sharded."""
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for module in model.modules():
        for one in module.parameters(recurse=False):
            owners.setdefault(one, set()).add(module)
    found: list[nn.Module] = []
    for module in wanted:
        inside = set(module.modules())
        parameters = [one for one in module.parameters() if one not in whole]
        own = bool(parameters) and all(owners[one] <= inside for one in parameters)
        if own and module is not model and module not in found:
            found.append(module)
    return found


def _sum_packed(tensors: list[torch.Tensor], line: Communicator) -> None:
    """Sum tensors over a line, in place, in few messages."""
    if line.size == 1:
        return
    group: list[torch.Tensor] = []
    size = 0
    for number, tensor in enumerate(tensors):
        group.append(tensor)
        size += tensor.numel() * tensor.element_size()
        if size >= _MESSAGE_BYTES or number == len(tensors) - 1:
            flat = torch.cat([one.reshape(-1) for one in group]).to(line.device)
            line.wait(line.all_reduce(flat))
            for one, part in zip(group, flat.split([one.numel() for one in group]), strict=True):
                one.copy_(part.view(one.shape))
            group, size = [], 0
