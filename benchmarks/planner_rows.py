"""Read published results (``published/results.csv``) as configs and assumptions of `plan`."""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assumed.keys import assume, parse_assumptions
from assumed.memory_total import MemoryKind

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.models.shape.dims import LanguageDims, dims_of
from paceline.parallel.registry import layout
from paceline.planner.devices import Device, find_device
from paceline.planner.from_config import setup_of
from paceline.planner.setup import TrainingSetup

RESULTS = Path(__file__).parent / "published" / "results.csv"
GIB = 2**30

#: Names of the file that differ from those of the table of devices.
_DEVICES = {
    "A100-SXM-80GB": "A100-80GB",
    "A100-SXM-40GB": "A100-40GB",
    "A800-SXM-80GB": "A800-80GB",
    "H100-SXM-80GB": "H100-SXM",
    "H100-80GB": "H100-SXM",
    "H100-SXM-94GB": "H100-SXM-96GB",
    "H100-SXM-96GB-HBM2e-500W": "H100-SXM-96GB",
    "B200-SXM": "B200",
    "RTX-PRO-6000": "RTX-PRO-6000-Blackwell",
    "RTX-4070Ti-SUPER": "RTX-4070-Ti-Super",
}
#: Projects, by the start of a row's source.
_PROJECTS = {
    "mosaicml/llm-foundry": "llm-foundry",
    "IST-DASLab/llmq:README": "llmq",
    "IST-DASLab/llmq:benchmarks": "LLaMA-Factory",
    "QwenLM/Qwen": "Qwen",
    "InternLM/InternEvo": "InternEvo",
    "MooreThreads/SimuMax": "Megatron-LM (SimuMax)",
    "NVIDIA/Megatron-LM": "Megatron-LM (2022)",
    "pytorch/torchtitan": "torchtitan",
    "pytorch/ao": "torchao",
    "Dao-AILab/flash-attention": "flash-attention",
}
#: How each project's kernels are launched and fused, by its documentation.
_SOFTWARE = {
    "llm-foundry": "eager",
    "llmq": "native",
    "Qwen": "eager-2023",
    "InternEvo": "fused",
    "Megatron-LM (SimuMax)": "fused",
    "Megatron-LM (2022)": "fused",
    "flash-attention": "fused",
}
_RECOMPUTATION = {
    "none": "none",
    "full": "full",
    "selective-op": "alternate-products",
    "selective-layer": "full",
    "partial": "selective",
}
#: Rows of torchao's table "training" whose column "scaling" is rowwise.
_SCALED_BY_ROW = ("r0758", "r0761", "r0762", "r0767")


#: Rows of torchao that compile the loss: those measured with torchtitan of August 2025, and those
#: of its script for quantized training.
_COMPILED_LOSS = (
    *("r0759", "r0760", "r0761", "r0762", "r0763", "r0764", "r0765", "r0766", "r0767"),
    *("r0781", "r0782", "r0783"),
)


class NotDescribed(Exception):
    """A row does not say enough to be predicted."""


@dataclass(frozen=True)
class Row:
    """A published result, and the set-up that `paceline plan` derives from it.

    Args:
        tokens_per_s: of a device; None if only memory was published.
        memory_bytes: as published; ``memory_kind`` is ``allocated``, ``reserved`` or ``driver``.
        layout: how the ranks are used; rows of a group with different ones are compared.
    """

    name: str
    project: str
    device: Device
    setup: TrainingSetup
    tokens_per_s: float | None
    memory_bytes: float | None
    memory_kind: MemoryKind
    layout: str
    group: tuple[str, ...]

    def rate(self, seconds: float) -> float:
        """Return the tokens per second of a device, if a step takes ``seconds``."""
        return self.setup.step_tokens / self.setup.world_size / seconds

    @property
    def step_s(self) -> float:
        assert self.tokens_per_s is not None
        return self.rate(1.0) / self.tokens_per_s


def read_rows(path: Path = RESULTS) -> tuple[list[Row], dict[str, int]]:
    """Return the rows that can be predicted, and the number of the others by reason."""
    rows, omitted = [], dict[str, int]()
    with path.open(encoding="utf-8", newline="") as file:
        for record in csv.DictReader(file):
            try:
                rows.append(_row(record))
            except NotDescribed as error:
                omitted[str(error)] = omitted.get(str(error), 0) + 1
    return rows, omitted


def _row(record: dict[str, str]) -> Row:
    project = _project(record["source"])
    dims = dims_of(_model(record))
    assert dims is not None
    config = _config(record)
    single = layout(config.parallel, 1, "single")
    setup = setup_of(config, dims, single, _number(record, "micro_batch"), _length(record))
    try:
        setup = assume(setup, parse_assumptions(_assumptions(record, project, dims)))
    except ConfigError as error:
        raise NotDescribed(error.what) from error
    if setup.world_size != int(record["num_gpus"]):
        raise NotDescribed("the sizes of the axes do not multiply to the number of GPUs")
    device = _device(record["hardware"])
    speed, memory = record["tokens_per_s_per_gpu"], record["memory_gib"]
    keys = ("source", "hardware", "num_gpus", "model", "seq_len", "global_batch_tokens")
    keys += ("precision", "training", "lora_targets")
    return Row(
        record["id"],
        project,
        device,
        setup,
        float(speed) if speed else None,
        float(memory) * GIB if memory else None,
        _memory_kind(record["memory_kind"]),
        record["strategy"],
        tuple(record[key] for key in keys),
    )


def _project(source: str) -> str:
    """Return the name of a project; of one that is not listed, that of its repository."""
    for start, name in _PROJECTS.items():
        if source.startswith(start):
            return name
    return source.partition(":")[0].rpartition("/")[2]


def _software_of(record: dict[str, str], project: str) -> str:
    """Return how kernels are launched: by the project's documentation, or by the row's fields."""
    if project in _SOFTWARE:
        return _SOFTWARE[project]
    text = f"{record['source']} {record['strategy']}".lower()
    if "megatron" in text or "nemo" in text:
        return "fused"
    return "compiled" if record["compile"] == "1" else "eager"


def _device(name: str) -> Device:
    try:
        return find_device(_DEVICES.get(name, name))[0]
    except ConfigError:
        raise NotDescribed("the device is not in the table") from None


def _number(record: dict[str, str], key: str) -> float:
    if not record[key]:
        raise NotDescribed(f"{key} is not published")
    return float(record[key])


def _length(record: dict[str, str]) -> float:
    return _number(record, "seq_len")


def _memory_kind(text: str) -> MemoryKind:
    if "allocated" in text:
        return "allocated"
    return "reserved" if "reserved" in text else "driver"


def _model(record: dict[str, str]) -> dict[str, Any]:
    """Return the row's model as the fields of a config.json."""
    if not record["hidden"]:
        raise NotDescribed("the widths of the model are not published")
    is_plain = record["mlp"] == "plain"
    kind = "mpt" if is_plain and record["model"].startswith("mpt") else "gpt2"
    return {
        "model_type": kind if is_plain else "llama",
        "hidden_size": int(record["hidden"]),
        "num_hidden_layers": int(record["layers"]),
        "num_attention_heads": int(record["heads"]),
        "num_key_value_heads": int(record["kv_heads"]),
        "head_dim": int(record["head_dim"]),
        "intermediate_size": int(record["ffn"]),
        "vocab_size": int(record["vocab"]),
        "tie_word_embeddings": record["tied"] == "1",
    }


def _config(record: dict[str, str]) -> Config:
    precision = "bf16-true" if record["master_weights"] == "bf16" else "bf16-mixed"
    args: dict[str, Any] = {
        "precision": precision,
        "per_device_train_batch_size": int(_number(record, "micro_batch")),
        "gradient_accumulation_steps": int(_number(record, "grad_accum")),
        "max_length": int(_length(record)),
    }
    lora: dict[str, Any] = {"enable": record["training"] != "full"}
    if lora["enable"]:
        args["precision"] = "bf16-mixed"
        lora |= {"rank": int(record["lora_rank"])}
    if record["training"] == "qlora":
        lora["quantize"] = "nf4"
    return Config(model="none", dataset="none", train_args=args, lora=lora)


def _assumptions(record: dict[str, str], project: str, dims: LanguageDims) -> list[str]:
    """Return what the row adds to its config, as values of `--assume`."""
    if record["offload"]:
        raise NotDescribed("what is offloaded is not published")
    recompute = _RECOMPUTATION.get(record["activation_checkpointing"])
    if recompute is None:
        raise NotDescribed("recomputation is not published")
    if project == "Megatron-LM (2022)":
        recompute = "attention"
    stage = int(record["zero_stage"] or 0)
    replicas = int(record["dp"])
    shard = int(record["shard"] or replicas) if stage else 1
    shard = max(1, min(shard, replicas))
    values: dict[str, object] = {
        "data": replicas // shard,
        "shard": shard,
        "tensor": record["tp"],
        "pipeline": record["pp"],
        "context": record["cp"],
        "expert": record["ep"],
        "chunks": record["pp_chunks"] or 1,
        "zero_stage": stage,
        "precision": "fp8" if "fp8" in record["precision"] else "bf16",
        "recompute": recompute,
        "recompute_share": 0.5 if record["activation_checkpointing"] == "selective-layer" else 1,
        "software": _software_of(record, project),
        "attention": "flash-1" if project == "llm-foundry" else "flash",
        "fp8_scaling": _float8_scaling(record, project),
        "sequence_parallel": str(record["sp"] == "1").lower(),
        "async_tensor": str("async TP" in record["notes"]).lower(),
        "splits_head": str(int(record["tp"]) > 1).lower(),
        "devices_per_host": max(1, -(-int(record["num_gpus"]) // int(record["nodes"] or 1))),
    }
    values |= _state(record, project)
    network = _host_network_gb_s(record["interconnect"], int(values["devices_per_host"]))
    if network is not None:
        values["host_network_gb_s"] = network
    return [f"{key}={value}" for key, value in values.items()]


def _float8_scaling(record: dict[str, str], project: str) -> str:
    """Return what shares a scale in float8. llm-foundry uses TransformerEngine, and llmq kernels of
    its own."""
    if project in ("llm-foundry", "llmq"):
        return "fused"
    if record["precision"] == "mxfp8":
        return "block"
    is_by_row = "rowwise" in record["notes"] or record["id"] in _SCALED_BY_ROW
    return "row" if is_by_row else "tensor"


def _state(record: dict[str, str], project: str) -> dict[str, object]:
    """Return how weights, gradients and moments are stored."""
    if record["training"] != "full":
        trains_tables = "wte" in record["lora_targets"]
        return {
            "trains_embeddings": str(trains_tables).lower(),
            "weight_bytes": 2,
            "gradient_bytes": 2,
            "reduce_bytes": 2,
            "cross_entropy": "plain",
        }
    moments = {
        "adamw bf16 moments": "adamw-bf16",
        "adamw8bit": "adamw-8bit",
        "adamw4bit": "adamw-4bit",
    }
    weights = record["master_weights"]
    values: dict[str, object] = {
        "cross_entropy": "plain",
        "optimizer": moments.get(record["optimizer"], "adamw"),
        "weight_bytes": 2 if weights == "bf16" else 4,
        "low_copy": str(weights.startswith("fp32+bf16")).lower(),
        "gradient_bytes": 4 if weights in ("fp32", "fp32+bf16, grads fp32") else 2,
        "reduce_bytes": 2 if weights in ("bf16", "fp32+bf16") or "PURE" in record["notes"] else 4,
    }
    if weights == "bf16" and record["optimizer"] == "adamw":
        values["optimizer"] = "adamw-bf16"
    if project in ("llm-foundry", "Megatron-LM (SimuMax)", "flash-attention"):
        values["cross_entropy"] = "fused"
    if project == "llmq":
        values["cross_entropy"] = "chunked"
    if record["id"] in _COMPILED_LOSS:
        values["cross_entropy"] = "compiled"
    return values


def _host_network_gb_s(text: str, devices: int) -> float | None:
    """Return the bandwidth of a host's cards as the row gives it: bits to bytes."""
    known = {
        "RoCE 1600 Gbit/s a node": 200.0,
        "4 x 100 Gbit/s RoCE a node": 50.0,
        "8 x 200 Gbit/s a node": 200.0,
        "400 Gbit/s RDMA a GPU": 50.0 * devices,
    }
    return known.get(text)
