"""Complete the files of a quantized model: nothing is missing, and servers know what is not
quantized."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from paceline.core.errors import RunError
from paceline.core.files import write_json_atomic
from paceline.inference.exports.quantized.worker import QuantizeResult
from paceline.models.json_config import JsonObject, read_object
from paceline.models.weights.base_checkpoint import open_base
from paceline.models.weights.keep_base import MISSING_BASE
from paceline.models.weights.release import read_entries
from paceline.models.weights.shards import INDEX, add_shard, shard_files

_CONFIG = "config.json"
#: Files of auto-round that repeat a part of config.json.
_REPEATED = ("quantization_config.json", "quantize_config.json")
#: Ends of the names of the tensors of a quantized layer. The first is of each of them.
_PARTS = (
    "weight_scale", "weight_packed", "weight_shape", "weight_zero_point",
    "qweight", "qzeros", "scales", "g_idx",
)  # fmt: skip
_SCALES = ("weight_scale", "scales")
#: Name of the layer that servers join a layer to.
_JOINED = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj", "w1": "w13"}


@dataclass(frozen=True)
class QuantizedCount:
    """What was quantized.

    Args:
        num_layers: number of quantized layers.
        num_unquantized: number of other layers with a matrix, without the weights of
            ``num_copied``.
        num_copied: number of weights that transformers does not load, copied byte for byte.
    """

    num_layers: int
    num_unquantized: int
    num_copied: int


def complete_files(
    written: Path, model: Path, folder: Path, result: QuantizeResult
) -> QuantizedCount:
    """Move the files of a quantized model to ``folder``, and add what they lack of the model.

    Args:
        written: folder that auto-round has written.
        model: folder of the model that was quantized.
        result: what the process reports of the model's weights.

    Raises:
        RunError: weights are missing.
    """
    for file in written.iterdir():
        if file.is_file() and file.name not in _REPEATED:
            file.rename(folder / file.name)
    entries = read_entries(shard_files(folder))
    layers = {
        name.removesuffix(f".{part}")
        for name in entries
        for part in _SCALES
        if name.endswith(f".{part}")
    }
    base = open_base(str(model))
    stored = set(base.weight_names()) - set(result.dropped) - set(result.constants)
    _check_names(stored, layers, set(entries), base.content)
    matrices = {
        name.removesuffix(".weight")
        for name, entry in entries.items()
        if name.endswith(".weight") and len(entry["shape"]) > 1
    } - layers
    copied = [name for name in result.dropped if name not in entries]
    if copied:
        add_shard(folder, {name: base.tensors[name].unchanged for name in copied})
    content = read_object(folder / _CONFIG) or {}
    settings = content.get("quantization_config")
    settings = dict(settings) if isinstance(settings, dict) else {}
    # Servers know the names in the files, and transformers those in the model.
    renamed = {result.renamed.get(f"{layer}.weight", layer) for layer in matrices}
    # A head that shares its weight with the embedding is not in the files.
    names = matrices | {name.removesuffix(".weight") for name in renamed} | {*result.unquantized}
    _exclude(settings, sorted(names), _prefixes(copied, set(entries)))
    _copy_files(model, folder)
    write_json_atomic(folder / _CONFIG, _config(base.content, content, settings))
    return QuantizedCount(len(layers), len(matrices), len(copied))


def _check_names(
    stored: set[str],
    layers: set[str],
    written: set[str],
    content: JsonObject,
) -> None:
    """Raise RunError if the weights of a model and of its quantized files are not the same."""
    parts = tuple(f".{part}" for part in _PARTS)
    names = {name for name in written if not name.endswith(parts)} | {
        f"{layer}.weight" for layer in layers
    }
    tied = {"lm_head.weight"} if content.get("tie_word_embeddings") else set()
    missing, unknown = stored - names - tied, names - stored - tied
    if missing or unknown or not layers:
        raise RunError(
            "auto-round does not write all weights of a model of type {model_type} under their"
            " names: {num_missing} are missing, {num_unknown} have other names ({examples})",
            code="quantized-weights-missing",
            fix="export the model in another form, such as `--gguf q8_0`",
            model_type=str(content.get("model_type")),
            num_missing=len(missing),
            num_unknown=len(unknown),
            examples=", ".join([*sorted(missing)[:2], *sorted(unknown)[:2]]) or "no layer",
        )


def _prefixes(names: Iterable[str], others: Collection[str]) -> list[str]:
    """Return the shortest prefixes of ``names`` that none of ``others`` has: ``mtp`` or
    ``model.layers.61``."""
    found: set[str] = set()
    for name in names:
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            prefix = ".".join(parts[:length])
            if not any(other == prefix or other.startswith(f"{prefix}.") for other in others):
                found.add(prefix)
                break
    return sorted(found)


def _exclude(settings: dict[str, JsonValue], layers: list[str], prefixes: list[str]) -> None:
    """Add what is not quantized to the settings that servers read."""
    method = settings.get("quant_method")
    if method == "compressed-tensors":
        patterns = [rf"re:^{re.escape(prefix)}(\..*)?$" for prefix in prefixes]
        settings["ignore"] = [*layers, *patterns]
    elif method == "awq":
        settings["modules_to_not_convert"] = [*layers, *prefixes]
    else:  # gptq: `-:` begins a pattern of layers that are skipped
        known = settings.get("dynamic")
        dynamic = dict(known) if isinstance(known, dict) else {}
        for layer in layers:
            parent, dot, last = layer.rpartition(".")
            joined = [f"{parent}{dot}{_JOINED[last]}"] if last in _JOINED else []
            dynamic |= {f"-:^{re.escape(name)}$": {} for name in (layer, *joined)}
        dynamic |= {rf"-:^{re.escape(prefix)}\.": {} for prefix in prefixes}
        settings["dynamic"] = dynamic


def _config(stored: JsonObject, written: JsonObject, settings: dict[str, JsonValue]) -> JsonObject:
    """Return the model's config.json with the settings of the quantization."""
    content: dict[str, JsonValue] = {
        key: value for key, value in stored.items() if key != "torch_dtype"
    }
    content["dtype"] = dtype = written.get("dtype")
    for value in content.values():
        if isinstance(value, dict) and "dtype" in value:
            value["dtype"] = dtype
    content["quantization_config"] = settings
    return content


def _copy_files(model: Path, folder: Path) -> None:
    """Copy the tokenizer, the chat template, licences, and so on: all files except weights."""
    for file in model.iterdir():
        is_weight = file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf")
        is_index = file.name == INDEX or file.name.endswith(".bin.index.json")
        is_replaced = is_weight or is_index or file.name in (_CONFIG, MISSING_BASE)
        if file.is_file() and not is_replaced:
            shutil.copyfile(file, folder / file.name)
