"""Exports with quantized weights, through auto-round: fp8 and w4a16 as compressed-tensors, gptq,
and awq."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.config.packages import check_package
from paceline.core.errors import ConfigError, RunError
from paceline.core.processes import end_with_parent, exit_text
from paceline.core.texts import UserText
from paceline.inference.device import inference_device
from paceline.inference.exports.core.estimate import model_bytes, stored_sizes
from paceline.inference.exports.core.forms import ExportEstimate, ExportSource, ProofLimit
from paceline.inference.exports.core.transformers_engine import TransformersProofEngine
from paceline.inference.exports.quantized.files import complete_files
from paceline.inference.exports.quantized.layers import (
    GROUP_SIZE,
    MULTIPLES,
    Scheme,
    fits,
    is_sensitive,
)
from paceline.inference.exports.quantized.worker import QuantizeJob, QuantizeResult
from paceline.models.hub_configs import read_raw_config
from paceline.models.kinds import LANGUAGE, VISION_LANGUAGE, saved_kind
from paceline.models.weights.release import KEYS

logger = logging.getLogger(__name__)

#: Schemes whose scales, or whose rounding, depend on the inputs of the layers.
_CALIBRATED: tuple[Scheme, ...] = ("w4a16", "gptq", "awq")
_LIMITS: dict[Scheme, float] = {"fp8": 0.05, "w4a16": 0.3, "gptq": 0.3, "awq": 0.3}
#: Package by which transformers reads gptq and awq.
_GPTQ_READER = "gptqmodel"
_MODULE = "paceline.inference.exports.quantized.worker"
#: Weights of experts that auto-round writes under the names that they are stored under.
_EXPERT = re.compile(r"\.experts\.\d+\.(gate|up|down)_proj\.weight$")
_PROGRESS = re.compile(r"Quantizing (\S+):\s+\d+%\|[^|]*\|\s*(\d+)/(\d+)")
#: Start of the process, and quantized numbers per second on two cores of a CPU: rounded, or with a
#: search of the scale of each group, as after calibration.
_START_S, _ROUNDED_PER_S, _SEARCHED_PER_S = 20.0, 4e6, 3e5
#: Output of the process that an error shows.
_LAST_LINES = 3


@dataclass
class QuantizedForm:
    """Quantized weights.

    Args:
        scheme: fp8, w4a16, gptq or awq.
    """

    scheme: Scheme
    merged_dtype: str | None = "auto"
    name: str = field(init=False)
    limit: ProofLimit = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.scheme
        self.limit = ProofLimit("kl", _LIMITS[self.scheme])

    def check(self, source: ExportSource) -> None:
        option = f"`--quantize {self.scheme}`"
        for package in ("auto_round", "compressed_tensors"):
            check_package(package, option, "export the model in another form", extra="quantize")
        kind = saved_kind(source.folder)
        if kind not in (LANGUAGE, VISION_LANGUAGE):
            raise ConfigError(
                "`--quantize {scheme}` is not supported for a {kind}",
                code="quantize-with-kind",
                allowed="causal language models and vision-language models",
                fix="export it without `--quantize`",
                scheme=self.scheme,
                kind=kind.noun,
            )
        content = read_raw_config(str(source.folder)) or {}
        if not source.is_adapter and any(content.get(key) for key in KEYS):
            raise ConfigError(
                "{source} is quantized already",
                code="quantize-quantized",
                fix="give the folder of the run, or of a model with weights in 16 or 32 bits",
                source=source.folder,
            )
        self._check_experts(source)
        self._check_sizes(source)

    def _check_experts(self, source: ExportSource) -> None:
        unknown = [
            name
            for name, _, shape, _ in stored_sizes(source.base)
            if len(shape) > 1 and not name.startswith("mtp.")
            if (".experts." in name and _EXPERT.search(name) is None)
            or (len(shape) == 3 and "conv" not in name)  # the experts of a layer are one tensor
        ]
        if unknown:
            content = read_raw_config(source.base) or {}
            raise ConfigError(
                "`--quantize {scheme}` is not supported for models of type {model_type}: auto-round"
                " cannot write its experts under the name {name}",
                code="quantize-experts",
                allowed="models that store each expert as gate_proj, up_proj and down_proj",
                fix="export it in another form, such as `--gguf q8_0`",
                scheme=self.scheme,
                model_type=str(content.get("model_type")),
                name=unknown[0],
            )

    def _check_sizes(self, source: ExportSource) -> None:
        sizes = stored_sizes(source.base)
        if sizes and not any(self._is_quantized(name, shape) for name, _, shape, _ in sizes):
            inputs, outputs = MULTIPLES[self.scheme]
            raise ConfigError(
                "`--quantize {scheme}`: no layer of the model has sizes that servers can multiply"
                " in this scheme",
                code="quantize-small-layers",
                allowed="layers whose number of inputs is a multiple of {inputs}, and whose number"
                " of outputs is a multiple of {outputs}",
                fix="use `--quantize fp8` or `--gguf q8_0`",
                scheme=self.scheme,
                inputs=inputs,
                outputs=outputs,
            )

    def estimate(self, source: ExportSource) -> ExportEstimate:
        sizes = stored_sizes(source.base)
        num_bytes, numbers = 0 if sizes else model_bytes(source.base), 0
        for name, _, shape, size in sizes:
            if self._is_quantized(name, shape):
                numbers += math.prod(shape)
                num_bytes += self._quantized_bytes(shape)
            else:
                num_bytes += size
        # The model in 16 bits, and the inputs of a block for all sequences.
        memory = int(model_bytes(source.base, "bfloat16") * 1.2) + (2 << 30)
        is_searched = self.scheme in ("w4a16", "gptq") and source.config is not None
        rate = _SEARCHED_PER_S if is_searched else _ROUNDED_PER_S
        return ExportEstimate(num_bytes, memory, _START_S + numbers / rate)

    def _is_quantized(self, name: str, shape: list[int]) -> bool:
        is_matrix = name.endswith(".weight") and len(shape) == 2
        return is_matrix and not is_sensitive(name) and fits(self.scheme, shape[1], shape[0])

    def _quantized_bytes(self, shape: list[int]) -> int:
        numbers = math.prod(shape)
        if self.scheme == "fp8":
            return numbers + 4 * shape[0]
        return numbers // 2 + 3 * numbers // GROUP_SIZE

    def write(self, source: ExportSource, model: Path, folder: Path) -> None:
        work = folder / ".quantize"
        work.mkdir()
        try:
            result = self._run(source, model.resolve(), work.resolve())
            written = next((work / "output").rglob("config.json")).parent
            count = complete_files(written, model, folder, result)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        logger.info(
            UserText(
                "quantized {num_layers} layers to {scheme}; {num_unquantized} stay in 16 bits, and"
                " {num_copied} weights that transformers does not load are copied",
                code="export-quantized",
                num_layers=count.num_layers,
                scheme=self.scheme,
                num_unquantized=count.num_unquantized,
                num_copied=count.num_copied,
            )
        )

    def _run(self, source: ExportSource, model: Path, work: Path) -> QuantizeResult:
        """Run the process that quantizes."""
        calibration = self._calibrate(source, model, work)
        result = work / "result.json"
        job = QuantizeJob(
            self.scheme,
            str(model),
            saved_kind(source.folder).auto_class,
            str(work / "output"),
            calibration,
            str(result),
            source.trusts_code,
        )
        (work / "job.json").write_text(json.dumps(asdict(job)))
        last, code = _run_worker(work)
        done = QuantizeResult([], [], {}, [])
        if result.is_file():
            done = QuantizeResult(**json.loads(result.read_text() or "{}"))
        if code == 0 and result.is_file():
            return done
        if done.errno == errno.ENOSPC or shutil.disk_usage(work).free < 1 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise RunError(
            "auto-round could not quantize the model: {reason}",
            code="quantize-failed",
            fix="export it in another form, such as `--gguf q8_0`; nothing was written",
            reason=done.error or last or exit_text(code),
        )

    def _calibrate(self, source: ExportSource, model: Path, work: Path) -> str | None:
        """Write the token IDs for calibration to a file, and return it; None without any."""
        if self.scheme not in _CALIBRATED:
            return None
        if self.scheme == "awq" and inference_device().type == "cpu":
            return None  # scales and zero points are taken from the weights alone
        reason = _no_calibration(source, model)
        if reason is not None:
            logger.warning(
                UserText(
                    "calibration is not possible: {reason}; weights are rounded to the nearest"
                    " value",
                    code="quantize-without-rows",
                    reason=reason,
                )
            )
            return None
        assert source.config is not None
        import torch
        from safetensors.torch import save_file

        from paceline.inference.exports.quantized.calibration import read_calibration

        rows = read_calibration(source.config, _model_config(source, model))
        if rows.tokens.size == 0:
            return None
        logger.info(
            UserText(
                "calibration: {num_rows} rows of the run's own data, {num_tokens} tokens in"
                " {num_sequences} sequences",
                code="quantize-calibration",
                num_rows=rows.num_rows,
                num_tokens=f"{rows.tokens.size:,}",
                num_sequences=len(rows.tokens),
            )
        )
        file = work / "calibration.safetensors"
        save_file({"tokens": torch.from_numpy(rows.tokens)}, file)
        return str(file)

    def unreadable(self) -> str | None:
        if self.scheme in ("fp8", "w4a16") or find_spec(_GPTQ_READER) is not None:
            return None
        return (
            f"transformers reads {self.scheme} with the package {_GPTQ_READER} only, which is not"
            " installed"
        )

    def open(self, folder: Path, trusts_code: bool = False) -> TransformersProofEngine:
        return TransformersProofEngine.load(folder, trusts_code)


def _model_config(source: ExportSource, model: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(str(model), trust_remote_code=source.trusts_code)


def _no_calibration(source: ExportSource, model: Path) -> UserText | None:
    """Return why a model cannot be calibrated, or None."""
    if source.config is None:
        return UserText(
            "{run} is not the folder of a run, so its training data is not known",
            code="no-rows-without-run",
            run=source.run,
        )
    kinds = sorted(_layer_kinds(model))
    if len(kinds) > 1:
        return UserText(
            "auto-round passes the inputs of the first layer's kind to all layers, and this model"
            " has layers of the kinds {kinds}",
            code="no-rows-for-kinds",
            kinds=", ".join(kinds),
        )
    return None


def _layer_kinds(model: Path) -> set[str]:
    """Return the kinds of a model's layers, if its config names them."""
    content = read_raw_config(str(model)) or {}
    for part in (content, content.get("text_config")):
        kinds = part.get("layer_types") if isinstance(part, dict) else None
        if isinstance(kinds, list):
            return {str(kind) for kind in kinds}
    return set()


def _run_worker(work: Path) -> tuple[str, int]:
    """Run the process whose job is in a folder, and log its progress. Return its last lines and its
    exit code."""
    end: Callable[[], None] = end_with_parent
    process = subprocess.Popen(
        [sys.executable, "-m", _MODULE, str(work / "job.json")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "AR_WORK_SPACE": str(work / "auto-round"),
            "AR_DISABLE_COPY_MTP_WEIGHTS": "1",
        },
        preexec_fn=end,
    )
    lines: deque[str] = deque(maxlen=_LAST_LINES)
    try:
        assert process.stdout is not None
        block = ""
        for raw in process.stdout:
            for line in raw.decode(errors="replace").replace("\r", "\n").splitlines():
                found = _PROGRESS.search(line)
                if found is None and line.strip():
                    lines.append(line.strip())
                elif found is not None and found[1] != block and int(found[2]) < int(found[3]):
                    block = found[1]
                    logger.info("quantizing %s, block %s of %s", block, int(found[2]) + 1, found[3])
        code = process.wait()
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
    return " ".join(lines), code
