"""A whole replica of the model on each rank: `ddp`, and `single`, which is the same with one rank."""

from __future__ import annotations

import torch
from torch import nn

from paceline.config.schema import Parallel
from paceline.parallel.base import BuildOptimizer, Cost, MicroStep, ModelShape, Strategy, storage_bytes
from paceline.parallel.buckets import GradientBuckets
from paceline.world.group import World, all_reduce_bytes


class DistributedDataParallel(Strategy):
    """Rank 0's weights are broadcast; gradients are summed over the ranks in buckets while backward goes on, once a step,
    not within an accumulation; every rank then makes the same update."""

    name = "ddp"

    def __init__(self, settings: Parallel, world: World) -> None:
        super().__init__(settings, world)
        self.model: nn.Module
        self.optimizer: torch.optim.Optimizer
        self.buckets: GradientBuckets

    def place(self, model: nn.Module) -> nn.Module:
        self.model = model
        self.trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
        self.world.broadcast([*model.parameters(), *model.buffers()])
        self.changing_buffers = [one for one in model.buffers() if self.world.size > 1 and _is_statistic(model, one)]
        self.buckets = GradientBuckets(self.trained.values(), int(self.settings.bucket_cap_mb * 2**20), self.world)
        return model

    def build_optimizer(self, build: BuildOptimizer) -> torch.optim.Optimizer:
        self.optimizer = build(list(self.trained.items()))
        return self.optimizer

    def backward(self, micro_step: MicroStep, num_micro_batches: int) -> None:
        self.buckets.zero()
        for number in range(num_micro_batches):
            loss = micro_step(number)
            if number == num_micro_batches - 1:
                self.buckets.start_reducing()
            loss.backward()
        self.buckets.finish()
        self.world.broadcast(self.changing_buffers)

    def clip(self, max_norm: float) -> torch.Tensor:
        norm = self.buckets.norm()
        if max_norm > 0:
            # As torch.nn.utils.clip_grad_norm_: never scales up. No branch on the value, so no wait for the device.
            self.buckets.scale((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def full_state(self) -> dict[str, torch.Tensor]:
        if not self.world.is_first:
            return {}
        state = {f"model/{name}": one for name, one in self.trained.items()}
        state |= {f"buffer/{name}": one for name, one in persistent_buffers(self.model).items()}
        for name, parameter in self.trained.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if value is not None:
                    state[f"optimizer/{name}/{key}"] = torch.as_tensor(value)
        return {name: one.detach().to("cpu", copy=True).contiguous() for name, one in state.items()}

    def load_full_state(self, state: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, one in [*self.trained.items(), *persistent_buffers(self.model).items()]:
                if self.world.is_first:
                    one.copy_(state[f"model/{name}" if name in self.trained else f"buffer/{name}"])
        self.world.broadcast([*self.trained.values(), *self.model.buffers()])
        self._load_optimizer(state)

    def _load_optimizer(self, state: dict[str, torch.Tensor]) -> None:
        layout = self.world.broadcast_object(
            [(key, tuple(one.shape), one.dtype) for key, one in state.items() if key.startswith("optimizer/")]
        )
        loaded: list[torch.Tensor] = []
        for key, shape, dtype in layout:  # type: ignore[attr-defined]
            name, _, entry = key.removeprefix("optimizer/").rpartition("/")
            parameter = self.trained[name]
            # Scalars such as Adam's step stay where the optimizer makes them: beside the parameter where it is fused.
            scalar_on_cpu = (
                shape == () and not self.optimizer.defaults.get("fused") and not self.optimizer.defaults.get("capturable")
            )
            device = torch.device("cpu") if scalar_on_cpu else parameter.device
            value = state[key].to(device) if self.world.is_first else torch.empty(shape, dtype=dtype, device=device)
            self.optimizer.state.setdefault(parameter, {})[entry] = value
            loaded.append(value)
        self.world.broadcast(loaded)

    @staticmethod
    def cost(shape: ModelShape, world_size: int) -> Cost:
        """Every rank holds everything: parameters, gradients and optimizer state. Each step sends the gradients once through an
        all-reduce: 2(N-1)/N × their bytes (Rajbhandari et al., "ZeRO", 2020, section 7.1: 2Ψ)."""
        gradients = sum(count * size for count, size in shape.trainable)
        elements = sum(count for count, _ in shape.trainable)
        return Cost(
            parameters=shape.parameter_bytes,
            gradients=gradients,
            optimizer=elements * shape.optimizer_bytes_per_element,
            traffic_per_step=all_reduce_bytes(gradients, world_size),
        )

    def state_bytes(self) -> int:
        held = [*self.model.parameters(), *self.model.buffers(), *self.buckets.flats]
        for entries in self.optimizer.state.values():
            held += [value for value in entries.values() if isinstance(value, torch.Tensor)]
        return storage_bytes(held)


class Single(DistributedDataParallel):
    """One rank: no collective is issued."""

    name = "single"


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that belong to the state dict, by name."""
    in_state = model.state_dict().keys()
    return {name: one for name, one in model.named_buffers() if name in in_state}


def _is_statistic(model: nn.Module, buffer: torch.Tensor) -> bool:
    """True for the running statistics of normalisation layers, which each rank would gather from its own share."""
    norms = (nn.modules.batchnorm._NormBase,)
    return any(buffer is one for module in model.modules() if isinstance(module, norms) for one in module.buffers())
