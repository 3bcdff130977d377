"""The strategies, and the settings that are combined with each of them."""

import itertools
from dataclasses import dataclass

from paceline.distributed.mesh import ParallelDims
from paceline.parallel.registry import OTHER_TRAINING
from paceline.parallel.support_table import reason_against, rows

#: Precision → largest relative difference to the losses of the CPU device.
TOLERANCES = {"32": 1e-5, "bf16-mixed": 2e-2, "fp16-mixed": 2e-2}
NUM_MICRO_BATCHES = 4


@dataclass(frozen=True)
class Switches:
    """Settings that are not part of a strategy."""

    is_lora: bool
    precision: str
    recomputes: bool
    packs: bool

    def __str__(self) -> str:
        names = (
            "lora" if self.is_lora else "full",
            self.precision,
            "recompute" if self.recomputes else "keep",
            "packed" if self.packs else "padded",
        )
        return "-".join(names)

    @property
    def args(self) -> tuple[str, ...]:
        values = {
            "lora.enable": self.is_lora,
            "gradient_checkpointing": self.recomputes,
            "packing": self.packs,
        }
        return (
            "lora.dropout=0",
            f"precision={self.precision}",
            *(f"{key}={str(value).lower()}" for key, value in values.items()),
        )


ALL_SWITCHES = [
    Switches(*values)
    for values in itertools.product((False, True), TOLERANCES, (False, True), (False, True))
]
FULL = Switches(is_lora=False, precision="32", recomputes=True, packs=True)
LORA_BF16 = Switches(is_lora=True, precision="bf16-mixed", recomputes=False, packs=False)
FULL_FP16 = Switches(is_lora=False, precision="fp16-mixed", recomputes=True, packs=False)
#: Each value of each switch. Few combinations, because each has a reference.
QUICK_SWITCHES = [FULL, LORA_BF16, FULL_FP16]


@dataclass(frozen=True)
class Layout:
    """A strategy with its mesh, and its settings in the section ``parallel``."""

    name: str
    mode: str
    dims: ParallelDims
    settings: dict[str, int]

    @property
    def reference(self) -> str:
        """The mode whose losses on the CPU device are expected."""
        return self.mode if self.mode in OTHER_TRAINING else "single"

    @property
    def args(self) -> tuple[str, ...]:
        """Arguments of a run, with a global batch of :data:`NUM_MICRO_BATCHES`."""
        accumulation = NUM_MICRO_BATCHES // self.dims.replicas
        return (
            f"parallel.mode={self.mode}",
            f"parallel.num_gpus={self.dims.size}",
            f"gradient_accumulation_steps={accumulation}",
            "per_device_train_batch_size=2",
            *(f"parallel.{key}={value}" for key, value in self.settings.items()),
            *(["local_sgd.sync_every=2"] if self.mode in OTHER_TRAINING else []),
        )

    def supports(self, switches: Switches) -> bool:
        settings = {
            "train_args": {
                "precision": switches.precision,
                "gradient_checkpointing": switches.recomputes,
                "packing": "auto" if switches.packs else False,
            },
            "lora": {"enable": switches.is_lora},
        }
        return reason_against(self.mode, self.dims, self.settings, settings) is None


def _hybrid(**sizes: int) -> Layout:
    name = "-".join(f"{axis}{size}" for axis, size in sizes.items())
    return Layout(name, "hybrid", ParallelDims(**sizes), sizes)


#: Every strategy of a language model.
LAYOUTS = [
    *(Layout(name, mode, dims, settings) for name, mode, dims, settings in rows()
      if mode != "parameter_server" and name != "expert"),
    _hybrid(shard=2, tensor=2),
    _hybrid(tensor=2, pipeline=2),
]  # fmt: skip
