"""The configs whose losses on the device are compared with the losses of a float32 run on the CPU.

``prepare.py`` writes them to ``configs.json``, and trains their references.
"""

from dataclasses import dataclass, field
from typing import Any

Settings = dict[str, Any]

#: Largest relative difference of a loss: float32, 16-bit precisions, and quantized weights, 8-bit
#: states or lossy communication, where rounding decides between values.
FLOAT32, LOW, QUANTIZED = 1e-3, 2e-2, 5e-2
NUM_STEPS = 4
#: Micro-batches of a step, over all ranks.
NUM_MICRO_BATCHES = 4
BASE: Settings = {
    "model": "models/small",
    "dataset": "data/rows.jsonl",
    "max_length": 128,
    "max_steps": NUM_STEPS,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "precision": "32",
    "logging_steps": 1,
}
LORA: Settings = {"lora.enable": True, "lora.dropout": 0}
BF16: Settings = {"precision": "bf16-mixed"}
FP16: Settings = {"precision": "fp16-mixed"}
FULL: Settings = {"gradient_checkpointing": "full"}
SELECTIVE: Settings = {"gradient_checkpointing": "selective"}
PADDED: Settings = {"packing": False}
COMPILED: Settings = {"torch_compile": True}


COMPRESSIONS = ("bf16", "fp16", "int8", "topk", "randomk", "powersgd", "signsgd")
ALGORITHMS = ("native", "ring", "tree", "halving", "naive")
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")


@dataclass(frozen=True)
class Training:
    """A config, and what its losses are compared with.

    Args:
        settings: keys of the config in addition to :data:`BASE`.
        reference: settings of the run in float32 on the CPU, with as many ranks as
            ``reference_ranks``.
        packages: packages that the config needs.
        needs_gpu: why the config cannot run on a simulated device; empty if it can.
        capability: lowest compute capability.
    """

    name: str
    settings: Settings
    tolerance: float = FLOAT32
    reference: Settings = field(default_factory=dict)
    num_ranks: int = 1
    reference_ranks: int = 1
    packages: tuple[str, ...] = ()
    needs_gpu: str = ""
    capability: tuple[int, int] = (0, 0)


def complete(settings: Settings, num_ranks: int) -> Settings:
    """Return all settings of a run, with the same global batch for each number of ranks."""
    mode = settings.get("parallel.mode", "single")
    sharing = 1 if mode in ("tensor", "pipeline") else num_ranks
    if mode == "hybrid":
        axes = (settings.get(f"parallel.{axis}", 1) for axis in ("tensor", "pipeline"))
        for size in axes:
            sharing //= size
    accumulation = {"gradient_accumulation_steps": NUM_MICRO_BATCHES // sharing}
    return {**BASE, "parallel.mode": mode, **accumulation, **settings}


def one_rank_trainings() -> list[Training]:
    """Pair the modes of one rank with precisions, packing, checkpointing and optimizers."""
    no_kernels = "the kernels of the package are for GPUs"
    no_compiler = "the compiler generates code for GPUs"
    return [
        *(_train(mode) for mode in ("single", "dp", "ddp", "zero1", "zero2", "zero3")),
        _train("tensor", PADDED),
        _train("pipeline", FULL),
        *(_train(mode, BF16, PADDED) for mode in ("single", "ddp", "zero1", "zero3")),
        *(_train(mode, BF16) for mode in ("single", "zero2", "tensor", "pipeline")),
        *(_train(mode, FP16, FULL) for mode in ("single", "ddp", "zero1", "zero2")),
        _train("zero3", FP16, SELECTIVE, PADDED),
        *(_train(mode, BF16, LORA) for mode in ("single", "ddp", "zero2", "zero3")),
        _train("tensor", BF16, LORA, FULL),
        _train("pipeline", BF16, LORA, PADDED),
        _train("single", LORA, FULL),
        _train("single", FULL),
        _train("single", SELECTIVE),
        _train("single", BF16, {"gradient_checkpointing": 2}),
        _train("zero3", FULL, PADDED),
        _train("single", {"loss_chunk_size": 64}),
        _train("single", BF16, {"loss_chunk_size": 64},
               needs_gpu="the CPU has no product of bfloat16 matrices with a float32 result"),
        _train("single", BF16, {"attn_implementation": "sdpa"}),
        _train("single", {"tf32": True}, tolerance=LOW),
        _train("single", {"precision": "bf16-true"}, tolerance=QUANTIZED),
        _train("single", {"precision": "bf16-true", **FULL, **PADDED}, tolerance=QUANTIZED),
        *(_optimize(name) for name in ("sgd", "adafactor", "lion", "muon")),
        _optimize("schedule_free_adamw", packages=("schedulefree",)),
        *(_optimize(name, packages=("bitsandbytes",), needs_gpu=no_kernels)
          for name in ("adamw_8bit", "paged_adamw_8bit")),
        _optimize("adamw_torchao_8bit", packages=("torchao",), needs_gpu=no_kernels),
        *(_train("single", BF16, LORA, {"lora.quantize": name}, tolerance=QUANTIZED,
                 packages=("bitsandbytes",), needs_gpu=no_kernels)
          for name in ("nf4", "fp4", "int8")),
        _train("single", {"parallel.cpu_offload": ["optimizer", "activations"]}),
        _train("zero3", {"parallel.cpu_offload": "all"}),
        _train("single", COMPILED, needs_gpu=no_compiler),
        _train("single", BF16, FULL, COMPILED, needs_gpu=no_compiler),
        _train("zero2", BF16, COMPILED, needs_gpu=no_compiler),
        _train("single", {"precision": "bf16-true"}, COMPILED, tolerance=QUANTIZED,
               needs_gpu=no_compiler),
        *(_train("single", BF16, COMPILED, {"fp8": name}, tolerance=QUANTIZED,
                 packages=("torchao",), needs_gpu=no_kernels, capability=(8, 9))
          for name in ("tensorwise", "rowwise")),
    ]  # fmt: skip


def several_rank_trainings() -> list[Training]:
    """Every strategy on two and on four ranks, which share a device."""
    trainings: list[Training] = []
    for size in (2, 4):
        trainings += [
            *(_train(mode, num_ranks=size) for mode in ("zero1", "zero2", "zero3")),
            *(_train("ddp", {"parallel.all_reduce_algorithm": name}, num_ranks=size)
              for name in ALGORITHMS),
            *(_compress(name, size) for name in COMPRESSIONS),
            *(_train_replicas(mode, size) for mode in ("local_sgd", "diloco")),
        ]  # fmt: skip
    trainings += [
        _train("ddp", BF16, LORA, num_ranks=2),
        _train("zero3", BF16, FULL, num_ranks=2),
        _train("zero2", FP16, num_ranks=2),
        _train("tensor", num_ranks=2),
        _train("tensor", {"parallel.sequence_parallel": True}, num_ranks=2),
        *(_train("pipeline", {"parallel.pipeline_schedule": name}, num_ranks=2)
          for name in SCHEDULES),
        *(_train("hybrid", {f"parallel.{axis}": 2 for axis in axes}, num_ranks=4)
          for axes in (("data", "shard"), ("data", "tensor"), ("data", "pipeline"),
                             ("shard", "tensor"), ("shard", "pipeline"),
                             ("tensor", "pipeline"))),
        _train_replicas("diloco", 2, {"local_sgd.fragment_sync_delay": 1}),
        _train_replicas("diloco", 2,
                        {"local_sgd.num_fragments": 2, "local_sgd.outer_dtype": "int8"},
                     tolerance=QUANTIZED),
    ]  # fmt: skip
    return sorted(trainings, key=lambda training: training.num_ranks)


def _train(
    mode: str,
    *parts: Settings,
    tolerance: float | None = None,
    num_ranks: int = 1,
    reference: Settings | None = None,
    **details: Any,
) -> Training:
    settings: Settings = {"parallel.mode": mode}
    for part in parts:
        settings |= part
    if tolerance is None:
        tolerance = FLOAT32 if settings.get("precision", "32") == "32" else LOW
    if reference is None:
        reference = LORA if settings.get("lora.enable") else {}
    names = [mode, *(_name(key, value) for part in parts for key, value in part.items())]
    text = " ".join(name for name in names if name)
    if num_ranks > 1:
        text = f"{text}, {num_ranks} ranks"
    return Training(text, settings, tolerance, reference, num_ranks, **details)


def _name(key: str, value: Any) -> str:
    if key == "precision":
        return str(value)
    if key == "lora.enable":
        return "LoRA"
    if key in ("lora.dropout", "compression.ratio", "local_sgd.sync_every"):
        return ""
    shown = "+".join(value) if isinstance(value, list) else str(value).lower()
    return f"{key.rpartition('.')[2]}={shown}"


def _optimize(name: str, **details: Any) -> Training:
    settings = {"optim": name}
    tolerance = LOW if "8bit" in name else FLOAT32
    return _train("single", settings, reference=settings, tolerance=tolerance, **details)


def _compress(method: str, num_ranks: int) -> Training:
    """Rounding decides which values are sent, so losses are close rather than equal."""
    settings = {"compression.method": method, "compression.ratio": 0.1}
    return _train(
        "ddp", settings, num_ranks=num_ranks, reference_ranks=num_ranks, tolerance=LOW,
        reference={"parallel.mode": "ddp", **settings},
    )  # fmt: skip


def _train_replicas(mode: str, num_ranks: int, *parts: Settings, **details: Any) -> Training:
    """Replicas that train independently are compared with as many replicas on the CPU."""
    settings: Settings = {"local_sgd.sync_every": 2, "max_steps": 6}
    for part in parts:
        settings |= part
    return _train(
        mode, settings, num_ranks=num_ranks, reference_ranks=num_ranks,
        reference={"parallel.mode": mode, **settings}, **details,
    )  # fmt: skip
