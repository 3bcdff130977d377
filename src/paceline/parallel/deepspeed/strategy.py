"""`deepspeed`: ZeRO stages 1, 2 and 3 by DeepSpeed itself, an optional extra.

DeepSpeed is driven through its engine: it owns the partitions, the collectives and the update.
Paceline keeps what is the same for every strategy: the loss and its global count, the schedule,
autocast, checkpoints (read from DeepSpeed's partitions, see
:mod:`paceline.parallel.deepspeed.package`).

The loss comes divided by the global count, so gradients must be *summed* over the ranks, and
DeepSpeed averages them. The loss is therefore multiplied by the number of ranks first. DeepSpeed
has a switch of its own (``gradient_allreduce_op``), but older versions lack it; the product is
exact where the number of ranks is a power of two, and elsewhere rounds once, by at most 6e-8 of the
gradient in float32.
"""

import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.communicator import Communicator
from paceline.distributed.traffic import uncounted
from paceline.models.blocks import BATCH_NORMS
from paceline.parallel.base import (
    MicroStep,
    OptimizerFactory,
    OptimizerStep,
    Strategy,
    optimizer_tensors,
    persistent_buffers,
    trained_parameters,
)
from paceline.parallel.deepspeed.config import engine_config, stage_of
from paceline.parallel.deepspeed.package import (
    Range,
    gradient_tensors,
    import_deepspeed,
    owners,
    quiet,
    ranges,
    refresh_weights,
)
from paceline.parallel.fsdp.check import offload_needs_accelerator
from paceline.parallel.gradients import changing_buffers
from paceline.parallel.state import TensorShard, low_dtype, storage_bytes


class DeepSpeedStrategy(Strategy):
    """DeepSpeed's ZeRO. In mixed precision the weights and gradients are bfloat16 or float16, as
    DeepSpeed does by default, and the optimizer updates float32 master weights in the partitions.
    The loss scale of float16 is Paceline's: DeepSpeed divides by it within its step, and reports
    overflows.

    At stage 3 every rank must run the same layers in a micro-batch: DeepSpeed gathers each layer's
    weights as it comes to it. DeepSpeed moves the whole model to the rank's device before it cuts
    it, so one device must hold the weights at the start.
    """

    name = "deepspeed"
    rank0_has_full_model = False
    optimizer: torch.optim.Optimizer
    handles_overflow = True
    unscales = True  # DeepSpeed divides by the loss scale within its step

    def __init__(self, config: Config, world: Communicator) -> None:
        super().__init__(config, world)
        self.stage = stage_of(self.config.parallel)
        self.engine: Any = None
        self.most_gradient_bytes = 0

    def setup(self, model: nn.Module) -> nn.Module:
        """The model goes to its ranks when the optimizer is built: DeepSpeed takes both at once."""
        if self.config.parallel.cpu_offload != "none" and self.world.device.type == "cpu":
            raise offload_needs_accelerator(self.config.parallel.cpu_offload)
        _check_types(model, low_dtype(self.config))
        self.model = model
        self.names = {one: name for name, one in model.named_parameters()}
        self.shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
        self.trained = trained_parameters(model)
        self.changing_buffers = changing_buffers(model) if self.world.size > 1 else []
        with uncounted():
            self.world.broadcast([*model.parameters(), *model.buffers()])
        return model

    def setup_optimizer(self, build: OptimizerFactory) -> torch.optim.Optimizer:
        deepspeed = import_deepspeed(self.world.device.type)
        self.norm = torch.zeros((), device=self.world.device)
        # DeepSpeed makes its float32 master weights from the weights that it has cast down: these
        # are put back afterwards.
        exact = (
            {name: one.detach().float().clone() for name, one in self.trained.items()}
            if low_dtype(self.config)
            else {}
        )
        elements = sum(one.numel() for one in self.trained.values())
        built = build(list(self.trained.items()))
        with uncounted(), quiet():
            _join(deepspeed, self.world)
            self.engine, *_ = deepspeed.initialize(
                model=self.model, optimizer=built, config=engine_config(self.config, elements)
            )
            self.zero = self.engine.optimizer
            self.optimizer = self.zero.optimizer
            self.zero.check_grad_overflow = True  # which it leaves out in float32
            if exact:
                for one in self._ranges():
                    whole = exact[self.names[one.parameter]].flatten()
                    one.of(one.flat).copy_(whole.narrow(0, one.offset, one.count))
        self._watch_gradients()
        return self.optimizer

    def _ranges(self) -> Iterator[Range]:
        return ranges(self.zero, self.stage, self.world.rank)

    # -- a step
    def forward_backward(self, micro_step: MicroStep, num_micro_batches: int) -> None:
        engine = self.engine
        for number in range(num_micro_batches):
            engine.set_gradient_accumulation_boundary(number == num_micro_batches - 1)
            # What engine.forward() does around the model's forward: the task gets the model itself,
            # not DeepSpeed's wrapper.
            _call(self.zero, "clear_backward_seen_flag")
            loss = micro_step(number, self.model)
            _call(engine, "_backward_prologue")
            engine.backward(loss * self.world.size, scale_wrt_gas=False)
            self._note_gradients()
        self.world.broadcast(self.changing_buffers)

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """DeepSpeed takes the norm and clips within its step: the tensor returned has its value
        after :meth:`optimizer_step`."""
        self.zero.clip_grad = max_norm
        return self.norm

    def optimizer_step(self, apply: OptimizerStep) -> bool:
        if self.scaler is not None:
            self.zero.loss_scale = float(self.scaler.scale)
        with quiet():
            done = apply(
                cast(
                    torch.optim.Optimizer,
                    SimpleNamespace(
                        step=self.engine.step, param_groups=self.optimizer.param_groups
                    ),
                )
            )
            if not done:  # DeepSpeed itself drops what it has gathered where that is not finite
                for one in gradient_tensors(self.zero, self.model):
                    one.fill_(math.nan)
                self.engine.step()
        if self.scaler is not None:
            self.zero.loss_scale = 1.0  # backward gets a loss that is scaled already
        self.norm.copy_(torch.as_tensor(self.engine.get_global_grad_norm()))
        return done and not self.zero.overflow

    def _watch_gradients(self) -> None:
        """Note the gradients at the moments when DeepSpeed holds most of them: before and after it
        reduces them."""
        for name in ("reduce_gradients", "reduce_ipg_grads"):
            inner = getattr(self.zero, name, None)
            if inner is not None:
                setattr(self.zero, name, self._noting(inner))

    def _noting(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._note_gradients()
            result = inner(*args, **kwargs)
            self._note_gradients()
            return result

        return call

    def _note_gradients(self) -> None:
        self.most_gradient_bytes = max(
            self.most_gradient_bytes, storage_bytes(gradient_tensors(self.zero, self.model))
        )

    # -- state
    @property
    def replica_group(self) -> Communicator | None:
        return None if self.stage == 3 else self.world

    def replicated_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self.model.named_parameters()  # the optimizer's state is in partitions

    def tensor_shards(self) -> Iterable[TensorShard]:
        for one in self._ranges():
            name = self.names[one.parameter]
            yield TensorShard(
                name,
                one.of(one.flat),
                self.shapes[name],
                (one.offset,),
                key=one.flat,
                flat=True,
                region=(slice(one.start, one.start + one.count),),
            )
        for name, buffer in persistent_buffers(self.model).items():
            yield TensorShard.whole(name, buffer, owned=self.world.is_rank_zero)

    def after_load(self) -> None:
        with torch.no_grad(), uncounted(), quiet():
            refresh_weights(self.zero, self.stage)

    def memory_tensors(self) -> list[torch.Tensor]:
        """Weights as the forward reads them, float32 partitions, optimizer state, and the gradients
        that are there at the time. With ``parallel.cpu_offload`` what lies in the host's memory is
        left out."""
        zero = self.zero
        found: list[Any] = [*self.model.buffers(), *owners(zero, self.stage)]
        for one in self.model.parameters():
            found += [one.data, getattr(one, "ds_tensor", None)]
        found += [*optimizer_tensors(self.optimizer), *gradient_tensors(zero, self.model)]
        tensors = [each for each in found if isinstance(each, torch.Tensor)]
        if self.config.parallel.cpu_offload != "none":
            tensors = [each for each in tensors if each.device.type == self.world.device.type]
        return tensors

    @property
    def transient_bytes(self) -> int:
        """DeepSpeed frees its gradients within the update: the most that was seen of them in a
        step, less those that are there now."""
        gradients = storage_bytes(gradient_tensors(self.zero, self.model))
        return max(0, self.most_gradient_bytes - gradients)


def _check_types(model: nn.Module, low_dtype: torch.dtype | None) -> None:
    norms = [
        one
        for one in model.modules()
        if isinstance(one, BATCH_NORMS) and one.running_mean is not None
    ]
    if low_dtype is not None and norms:
        kind = type(norms[0]).__name__
        raise ConfigError(
            f"mixed precision with `parallel.mode: deepspeed`, and the model has {kind}: DeepSpeed"
            " makes its weights half precision, beside float32 running statistics, and it cannot"
            " compute with both",
            allowed="models without running statistics, or float32",
            fix="set `parallel.mode: ddp`, or `train_args.precision: 32`",
        )


def _join(deepspeed: Any, world: Communicator) -> None:
    """Let DeepSpeed use this rank's process group: it must neither look for MPI nor compile kernels
    to talk through."""
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


def _call(holder: Any, name: str) -> None:
    """Call a method that DeepSpeed's older versions do not have (there, ``backward`` does its
    work)."""
    method = getattr(holder, name, None)
    if callable(method):
        method()


warnings.filterwarnings(
    "ignore", category=FutureWarning, message=r"`torch\.distributed\.\w+_tensor` is deprecated"
)
