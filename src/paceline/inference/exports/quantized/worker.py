"""The process that quantizes a model with auto-round, whose import changes the process, and which
writes progress to the standard output."""

from __future__ import annotations

import errno
import gc
import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from paceline.core.errors import first_line
from paceline.core.processes import end_with_parent
from paceline.inference.exports.quantized.layers import (
    Scheme,
    linear_shapes,
    unquantized_layers,
)

if TYPE_CHECKING:
    import torch

#: Scheme of auto-round, and the format of its files.
_SCHEMES: dict[Scheme, tuple[str | dict[str, JsonValue], str]] = {
    "fp8": (
        {
            "bits": 8, "data_type": "fp", "group_size": -1, "sym": True, "act_bits": 8,
            "act_data_type": "fp", "act_group_size": -1, "act_dynamic": True, "act_sym": True,
        },
        "llm_compressor",
    ),
    "w4a16": ("W4A16", "llm_compressor"),
    "gptq": ("W4A16", "auto_gptq"),
    "awq": (
        {"bits": 4, "data_type": "int", "group_size": 128, "sym": False, "act_bits": 16},
        "auto_awq",
    ),
}  # fmt: skip
#: Steps of the search for the rounding of each block, with an accelerator. On a CPU, where a step
#: takes seconds, weights are rounded to the nearest value instead.
ITERATIONS = 200
_EXPERT = re.compile(r"\.experts\.\d+\.")
_16_BITS = {"bits": 16, "act_bits": 16, "data_type": "float", "act_data_type": "float"}


@dataclass(frozen=True)
class QuantizeJob:
    """What the process does.

    Args:
        scheme: fp8, w4a16, gptq or awq.
        model: folder of the model.
        auto_class: name of transformers' class that loads it.
        output: folder that receives a folder with the files.
        calibration: file with the token IDs, or None.
        result: file that receives a :class:`QuantizeResult`.
        trusts_code: whether code in the model's folder may run.
    """

    scheme: Scheme
    model: str
    auto_class: str
    output: str
    calibration: str | None
    result: str
    trusts_code: bool = False


@dataclass(frozen=True)
class QuantizeResult:
    """What the process has done.

    Args:
        dropped: names of weights in the model's files that transformers does not load.
        constants: names of other tensors that it does not load, because it computes them.
        renamed: names of weights in the model, by other names in the files.
        unquantized: names of linear layers of blocks that stay in 16 bits.
        error: why it failed, or None.
        errno: number of the error of the operating system, or None.
    """

    dropped: list[str]
    constants: list[str]
    renamed: dict[str, str]
    unquantized: list[str]
    error: str | None = None
    errno: int | None = None


def quantize(job: QuantizeJob) -> QuantizeResult:
    """Quantize a model, and write it."""
    import torch
    import transformers
    from auto_round import AutoRound

    from paceline.inference.device import inference_device
    from paceline.models.transformers_compat import match_names
    from paceline.models.weights.base_checkpoint import open_base

    trust: dict[str, bool] = {"trust_remote_code": True} if job.trusts_code else {}
    model = _load(getattr(transformers, job.auto_class), job.model, trust)
    base = open_base(job.model)
    names = base.weight_names()
    match = match_names(model, names)
    dropped = base.dropped(match)
    shapes = linear_shapes(model)
    shapes |= {
        name.removesuffix(".weight"): (int(shape[0]), int(shape[1]))
        for name, tensor in base.tensors.items()
        if _EXPERT.search(name) and name not in dropped
        if len(shape := tensor.header["shape"]) == 2
    }
    unquantized = unquantized_layers(shapes, job.scheme)
    device = inference_device()
    scheme, file_format = _SCHEMES[job.scheme]
    data = _batches(job.calibration, torch)
    compressor: Any = AutoRound(
        model,
        transformers.AutoTokenizer.from_pretrained(job.model, **trust),
        scheme=dict(scheme) if isinstance(scheme, dict) else scheme,
        layer_config={name: dict(_16_BITS) for name in sorted(unquantized)},
        iters=ITERATIONS if data and device.type != "cpu" else 0,
        disable_opt_rtn=None if data else True,
        dataset=data or [],
        nsamples=max(1, len(data)),
        seqlen=int(data[0]["input_ids"].shape[1]) if data else 1,
        batch_size=4,
        device_map=str(device),
        enable_torch_compile=False,
    )
    gc.freeze()  # auto-round collects garbage after each block
    compressor.quantize_and_save(job.output, format=file_format)
    constants = sorted(set(names) - set(match.used) - set(dropped))
    renamed = {stored: name for stored, name in match.used.items() if stored != name}
    return QuantizeResult(dropped, constants, renamed, sorted(unquantized))


def _load(auto_class: Any, name: str, trust: dict[str, bool]) -> Any:
    """Return a model in 16 bits, which the kernels for quantized weights need."""
    import torch

    from paceline.models.weights.load import load_pretrained

    model = load_pretrained(auto_class, name, dtype="auto", **trust)
    if model.dtype != torch.float32:
        return model
    return load_pretrained(auto_class, name, dtype=torch.bfloat16, **trust)


def _batches(file: str | None, torch: Any) -> list[dict[str, torch.Tensor]]:
    if file is None:
        return []
    from safetensors.torch import load_file

    tokens = load_file(file)["tokens"]
    return [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in tokens.split(1)]


def main() -> None:
    """Run the job that is in the file of the first argument."""
    end_with_parent()
    job = QuantizeJob(**json.loads(Path(sys.argv[1]).read_text()))
    try:
        result = quantize(job)
    except Exception as error:
        text = f"{type(error).__name__}: {first_line(error)}"
        number = error.errno if isinstance(error, OSError) else None
        if number is None and "No space left" in str(error):
            number = errno.ENOSPC
        Path(job.result).write_text(
            json.dumps(asdict(QuantizeResult([], [], {}, [], text, number)))
        )
        raise
    Path(job.result).write_text(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
