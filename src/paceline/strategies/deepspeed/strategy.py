"""`deepspeed`: ZeRO stages 1, 2 and 3 with DeepSpeed, an optional dependency.

DeepSpeed's engine is responsible for the partitions, the collectives and the update. As for every
strategy, Paceline computes the loss and its global count, and handles the learning rate schedule,
autocast and checkpoints, which it reads from DeepSpeed's partitions (see
:mod:`paceline.strategies.deepspeed.package`).

The loss is already divided by the global count, so gradients must be *summed* over the ranks, but
DeepSpeed averages them. The loss is therefore multiplied by the number of ranks first. DeepSpeed
has an option for this (``gradient_allreduce_op``), but older versions lack it. The product is exact
if the number of ranks is a power of two; otherwise it rounds once, by at most 6e-8 of the gradient
in float32.
"""

import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.texts import UserText
from paceline.distributed.communicator import Communicator
from paceline.distributed.traffic import uncounted
from paceline.models.blocks import BATCH_NORMS
from paceline.parallel.gradients import changing_buffers
from paceline.parallel.initial_weights import sync_weights
from paceline.parallel.optimizer_state import optimizer_tensors
from paceline.parallel.state import (
    TensorShard,
    low_dtype,
    persistent_buffers,
    storage_bytes,
    trained_parameters,
)
from paceline.parallel.strategy import (
    MemoryKind,
    MicroStep,
    OptimizerFactory,
    OptimizerStep,
    Strategy,
)
from paceline.strategies.deepspeed.config import engine_config, stage_of
from paceline.strategies.deepspeed.package import (
    PartitionRange,
    gradient_tensors,
    import_deepspeed,
    owners,
    prepare_backward,
    quiet,
    ranges,
    refresh_weights,
)
from paceline.strategies.fsdp.check import offload_needs_accelerator

#: Steps in which the memory of gradients is recorded: the second has the optimizer's state too.
_NOTED_STEPS = 2


class DeepSpeedStrategy(Strategy):
    """Trains with DeepSpeed's ZeRO.

    In mixed precision, weights and gradients are bfloat16 or float16 (DeepSpeed's default), and the
    optimizer updates float32 master weights in the partitions. For float16, Paceline sets the loss
    scale, and DeepSpeed divides by it within its step and reports overflows.

    At stage 3 every rank must run the same layers in a micro-batch, since DeepSpeed gathers the
    weights of each layer when it runs. DeepSpeed moves the full model to the rank's device before
    it is partitioned, so one device must have memory for all weights at the start.
    """

    name = "deepspeed"
    runs_trials = False  # DeepSpeed counts a dropped gradient as a skipped step
    rank0_has_full_model = False
    handles_overflow = True
    keeps_state_on_host = True

    def __init__(self, config: Config, world: Communicator) -> None:
        super().__init__(config, world)
        self.stage = stage_of(self.config.parallel)
        self.engine: Any = None
        self._num_steps = 0
        is_set = "reduce_dtype" in config.parallel.model_fields_set
        if is_set and low_dtype(config) and config.parallel.reduce_dtype == "float32":
            text = UserText(
                "`parallel.reduce_dtype: float32` has no effect with DeepSpeed, which reduces"
                " gradients in the type of `train_args.precision`",
                code="reduce-dtype-without-effect",
            )
            self.notices.append(("warning", text))

    def setup(self, model: nn.Module) -> nn.Module:
        """Check and broadcast the model. It is partitioned in :meth:`setup_optimizer`, since
        DeepSpeed takes model and optimizer together."""
        if self.config.parallel.state_offload != "none" and self.world.device.type == "cpu":
            raise offload_needs_accelerator(self.config.parallel.offload_text)
        _check_types(model, low_dtype(self.config))
        self.model = model
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self.trained = trained_parameters(model)
        with uncounted():
            sync_weights(model, self.world)
        return model

    def setup_optimizer(self, build: OptimizerFactory) -> torch.optim.Optimizer:
        deepspeed = import_deepspeed(self.world.device.type)
        self.norm = torch.zeros((), device=self.world.device)
        # DeepSpeed makes its float32 master weights from weights in low precision, so their exact
        # values are restored afterwards.
        exact: dict[str, torch.Tensor] = {}
        if low_dtype(self.config):
            exact = {
                name: parameter.detach().float().clone() for name, parameter in self.trained.items()
            }
        elements = sum(parameter.numel() for parameter in self.trained.values())
        built = build(list(self.trained.items()))
        with uncounted(), quiet():
            _join(deepspeed, self.world)
            self.engine, *_ = deepspeed.initialize(
                model=self.model, optimizer=built, config=engine_config(self.config, elements)
            )
            # DeepSpeed has moved the model to the device, which replaces its buffers.
            self.changing_buffers = changing_buffers(self.model) if self.world.size > 1 else []
            self.zero = self.engine.optimizer
            self.optimizer = self.zero.optimizer
            self.zero.check_grad_overflow = True  # off by default in float32
            if exact:
                for part in self._ranges():
                    values = exact[self.names[part.parameter]].flatten()
                    part.values.copy_(values.narrow(0, part.offset, part.count))
        # DeepSpeed holds most gradients right before and after it reduces them.
        for name in ("reduce_gradients", "reduce_ipg_grads"):
            reduce = getattr(self.zero, name, None)
            if reduce is not None:
                setattr(self.zero, name, self._noting_gradients(reduce))
        return self.optimizer

    def _ranges(self) -> Iterator[PartitionRange]:
        return ranges(self.zero, self.stage, self.world.rank)

    # -- a step
    def forward_backward(self, micro_step: MicroStep, num_micro_batches: int) -> None:
        self.accumulate(micro_step, self.model, num_micro_batches)

    def begin_accumulation(self) -> None:
        self._begin_forward()

    def _begin_forward(self) -> None:
        """Do what engine.forward() does before the model's forward; the task receives the model,
        not DeepSpeed's wrapper. Older versions of DeepSpeed do this in ``backward``."""
        getattr(self.zero, "clear_backward_seen_flag", lambda: None)()

    def backward(self, loss: torch.Tensor) -> None:
        self._run_backward(loss, is_last=False)
        self._begin_forward()

    def last_backward(self, loss: torch.Tensor) -> None:
        self._run_backward(loss, is_last=True)

    def _run_backward(self, loss: torch.Tensor, is_last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(is_last)
        prepare_backward(self.engine)
        self.engine.backward(loss * self.world.size, scale_wrt_gas=False)
        self._note_gradients()

    def end_accumulation(self) -> None:
        self.world.broadcast(self.changing_buffers)

    @property
    def unscales(self) -> bool:
        """True: DeepSpeed divides by the loss scale within its step."""
        return True

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Set the norm to which DeepSpeed clips within its step.

        The returned tensor has its value after :meth:`optimizer_step`.
        """
        self.zero.clip_grad = max_norm
        return self.norm

    def optimizer_step(self, apply: OptimizerStep) -> bool:
        self._num_steps += 1
        if self.scaler is not None:
            self.zero.loss_scale = float(self.scaler.scale)
        engine: Any = SimpleNamespace(
            step=self.engine.step, param_groups=self.optimizer.param_groups
        )
        with quiet():
            updated = apply(engine)
            if not updated:  # DeepSpeed skips the update and drops gradients that are not finite
                for gradient in gradient_tensors(self.zero, self.model):
                    gradient.fill_(math.nan)
                if getattr(self.zero, "cpu_offload", False):  # its gradients are on the host
                    self.zero.local_overflow = True
                self.engine.step()
        if self.scaler is not None:
            self.zero.loss_scale = 1.0  # backward receives a loss that is already scaled
        self.norm.copy_(torch.as_tensor(self.engine.get_global_grad_norm()))
        return updated and not self.zero.overflow

    def _noting_gradients(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._note_gradients()
            result = reduce(*args, **kwargs)
            self._note_gradients()
            return result

        return call

    def _gradient_bytes(self) -> int:
        return storage_bytes(gradient_tensors(self.zero, self.model))

    def _note_gradients(self) -> None:
        """Record the bytes of gradients. All steps have the same peak, and each record visits every
        parameter."""
        if self._num_steps >= _NOTED_STEPS:
            return
        self.peak_gradient_bytes = max(self.peak_gradient_bytes, self._gradient_bytes())

    # -- state
    @property
    def replica_group(self) -> Communicator | None:
        return None if self.stage == 3 else self.world

    def replicated_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self.model.named_parameters()  # without the optimizer state, which is partitioned

    def tensor_shards(self) -> Iterable[TensorShard]:
        for part in self._ranges():
            name = self.names[part.parameter]
            yield TensorShard(
                name,
                part.values,
                self.shapes[name],
                (part.offset,),
                key=part.flat,
                flat=True,
                region=(slice(part.start, part.start + part.count),),
            )
        for name, buffer in persistent_buffers(self.model).items():
            yield TensorShard.full(name, buffer, owned=self.world.is_rank_zero)

    def after_load(self) -> None:
        with torch.no_grad(), uncounted(), quiet():
            refresh_weights(self.zero, self.stage)

    @property
    def other_memory_kind(self) -> MemoryKind:
        """Kind of the float32 weights in the partitions."""
        return "optimizer"

    def memory_by_kind(self, model: nn.Module) -> dict[MemoryKind, list[torch.Tensor]]:
        kinds = super().memory_by_kind(model)
        kinds["gradients"] += gradient_tensors(self.zero, model)
        shards = (getattr(parameter, "ds_tensor", None) for parameter in model.parameters())
        kinds["parameters"] += [shard for shard in shards if shard is not None]
        return kinds

    def memory_tensors(self) -> list[torch.Tensor]:
        """Return the weights that the forward reads, float32 partitions, optimizer state, and the
        gradients that exist now."""
        tensors = [
            *self.model.buffers(),
            *owners(self.zero, self.stage),
            *optimizer_tensors(self.optimizer),
            *gradient_tensors(self.zero, self.model),
        ]
        for parameter in self.model.parameters():
            partition = getattr(parameter, "ds_tensor", None)
            tensors += [parameter.data] if partition is None else [parameter.data, partition]
        return tensors

    @property
    def transient_bytes(self) -> int:
        """Peak bytes of gradients within a step, less those that exist now: DeepSpeed frees them
        within the update."""
        return max(0, self.peak_gradient_bytes - self._gradient_bytes())


def _check_types(model: nn.Module, low_dtype: torch.dtype | None) -> None:
    norms = [
        module
        for module in model.modules()
        if isinstance(module, BATCH_NORMS) and module.running_mean is not None
    ]
    if low_dtype is not None and norms:
        kind = type(norms[0]).__name__
        raise ConfigError(
            "mixed precision with `parallel.mode: deepspeed` is not supported with {kind}:"
            " DeepSpeed converts its weights to half precision, which cannot be combined with"
            " float32 running statistics",
            code="deepspeed-with-running-statistics",
            allowed="models without running statistics, or float32",
            fix="set `parallel.mode: ddp`, or `train_args.precision: 32`",
            kind=kind,
        )


def _join(deepspeed: Any, world: Communicator) -> None:
    """Make DeepSpeed use this rank's process group, without MPI and without compiled kernels for
    communication."""
    os.environ.setdefault("LOCAL_RANK", str(world.env.local_rank))
    if not dist.is_initialized():  # one rank has no group
        dist.init_process_group(
            "gloo" if world.device.type == "cpu" else None,
            store=dist.HashStore(),
            rank=0,
            world_size=1,
        )
    compatible = getattr(deepspeed.ops, "__compatible_ops__", {})
    compatible["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)


warnings.filterwarnings(
    "ignore", category=FutureWarning, message=r"`torch\.distributed\.\w+_tensor` is deprecated"
)
