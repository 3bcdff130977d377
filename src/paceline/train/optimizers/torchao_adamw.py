"""AdamW with 8-bit moments, from torchao."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version

import torch
from torch import Tensor
from torchao.optim import AdamW8bit as TorchaoAdamW

from paceline.core.errors import ConfigError
from paceline.train.optimizers.blockwise import dequantize, quantize

SUPPORTED = "torchao>=0.18,<0.19"
_MOMENTS = ("exp_avg", "exp_avg_sq")

if not hasattr(TorchaoAdamW, "_new_buffer"):  # not documented
    raise ConfigError(
        "torchao {version} has no `AdamW8bit._new_buffer`, which `train_args.optim:"
        " adamw_torchao_8bit` requires",
        code="missing-in-torchao",
        allowed=SUPPORTED,
        fix="run `pip install '{supported}'`",
        version=version("torchao"),
        supported=SUPPORTED,
    )


class TorchaoAdamW8bit(TorchaoAdamW):  # type: ignore[misc]
    """torchao's AdamW, whose state can be stored in checkpoints.

    torchao compiles the update. On a CPU, where this needs a C++ compiler and takes seconds for
    each shape, it runs uncompiled.
    """

    def step(self, closure: Callable[[], float] | None = None) -> None:
        params = (param for group in self.param_groups for param in group["params"])
        context: AbstractContextManager[object] = nullcontext()
        if all(param.device.type == "cpu" for param in params):
            context = torch.compiler.set_stance("force_eager")
        with context:
            super().step(closure)

    def stored_state(self, key: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return a parameter's state as a checkpoint contains it, in host memory: the float32
        moments and the step; and the scales by moment."""
        state = self.state.get(key, {})
        if "step" not in state:
            return {}, {}
        entries, scales = {"step": state["step"]}, {}
        for name in _MOMENTS:
            value = state[name]
            if hasattr(value, "codes"):
                scales[name] = value.scale.cpu()
                value = dequantize(value.codes, value.qmap, value.scale)
            entries[name] = value.cpu()
        return entries, scales

    def load_stored(self, key: Tensor, scales: dict[str, Tensor]) -> None:
        """Convert the state of a parameter, as it was read from a checkpoint."""
        state = self.state[key]
        for name in _MOMENTS:
            if name not in state:
                continue
            values = state[name]
            state[name] = buffer = self._new_buffer(key, name == "exp_avg")
            if hasattr(buffer, "codes"):
                codes, blocks = quantize(values, buffer.qmap, scales.get(name))
                buffer.codes.copy_(codes)
                buffer.scale.copy_(blocks)
            else:
                buffer.copy_(values)
