"""AdamW with 8-bit moments, from bitsandbytes."""

from typing import Any

import torch
from bitsandbytes.optim.adamw import AdamW8bit as BitsAndBytesAdamW
from torch import Tensor

from paceline.train.optimizers.blockwise import dequantize, quantize

#: Moments in a checkpoint → their numbers in the names of bitsandbytes.
_MOMENTS = {"exp_avg": "1", "exp_avg_sq": "2"}


class AdamW8bit(BitsAndBytesAdamW):
    """bitsandbytes' AdamW, whose state can be stored in checkpoints."""

    def update_step(
        self, group: dict[str, Any], parameter: Tensor, group_number: int, number: int
    ) -> None:
        """Update a parameter. A shard may have no elements, for which no CUDA kernel can run."""
        if parameter.numel():
            super().update_step(group, parameter, group_number, number)  # type: ignore[no-untyped-call]
        else:
            self.state[parameter]["step"] += 1

    def stored_state(self, key: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return a parameter's state as a checkpoint contains it, in host memory: the float32
        moments and the step; and the scales by moment."""
        state = self.state.get(key, {})
        if "state1" not in state:
            return {}, {}
        entries, scales = {"step": torch.tensor(float(state["step"]))}, {}
        for name, number in _MOMENTS.items():
            value = state[f"state{number}"]
            if value.dtype == torch.uint8:
                absmax = state[f"absmax{number}"]
                value = dequantize(value, state[f"qmap{number}"], absmax)
                scales[name] = absmax.cpu()
            entries[name] = value.cpu()
        return entries, scales

    def load_stored(self, key: Tensor, scales: dict[str, Tensor]) -> None:
        """Convert the state of a parameter, as it was read from a checkpoint."""
        state = self.state[key]
        if not _MOMENTS.keys() <= state.keys():
            return
        moments = {number: state.pop(name) for name, number in _MOMENTS.items()}
        step = int(state.pop("step"))
        state.clear()
        self._init_state_of(key)
        state["step"] = step
        for name, number in _MOMENTS.items():
            buffer, values = state[f"state{number}"], moments[number]
            if buffer.dtype == torch.uint8:
                codes, blocks = quantize(values, state[f"qmap{number}"], scales.get(name))
                buffer.copy_(codes)
                state[f"absmax{number}"].copy_(blocks)
            else:
                buffer.copy_(values)

    def _init_state_of(self, key: Tensor) -> None:
        for group_index, group in enumerate(self.param_groups):
            for index, param in enumerate(group["params"]):
                if param is key:
                    self.init_state(  # type: ignore[no-untyped-call]
                        group, param, group_index, index
                    )
