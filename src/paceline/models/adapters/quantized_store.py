"""Quantized weights in the cache: they are computed once per host, and later runs read them.

The layers are divided into parts, and each part is an entry of the cache. The ranks of a host build
different parts at the same time, and all of them map the files of all parts into memory. A rank
waits for a part only while another process holds its lock, which a killed process releases; no
process group is needed.
"""

from __future__ import annotations

import logging
import shutil
import time
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from paceline.core.errors import ConfigError, RunError, first_line
from paceline.core.files import cache_dir, human_bytes
from paceline.core.formatting import counted
from paceline.core.log import ON_EVERY_RANK
from paceline.core.texts import UserText
from paceline.data.cache import build_once, discard, key_of
from paceline.distributed.environment import from_environment
from paceline.distributed.torch_compat import has_values
from paceline.models.hub_configs import config_folder
from paceline.models.weights.load import is_from_files
from paceline.models.weights.stored_files import files_identity

if TYPE_CHECKING:
    from torch import nn

    from paceline.config.schema import Config

logger = logging.getLogger(__name__)

#: The tensors of a quantized weight by name: its numbers, its scales and their tables.
WeightTensors = dict[str, torch.Tensor]

#: Increased when the stored tensors or their computation change.
_LAYOUT = 1
_PACKAGES = ("bitsandbytes", "torch", "transformers")
_FILE, _CHECKSUM = "layers.safetensors", "crc32"
#: A part has at least this share of the numbers of all layers.
_PART_SHARE = 1 / 64


def stored_weights(
    model: Any,
    layers: Mapping[str, nn.Linear],
    config: Config,
    settings: list[Any],
    pack: Callable[[str], WeightTensors],
) -> dict[str, WeightTensors]:
    """Return the quantized weights of layers, mapped from files in the cache, which are written on
    first use. Layers whose weights cannot be stored are left out, and a message says why.

    Args:
        layers: layers of ``model`` to quantize, by name.
        settings: JSON values that the quantized weights depend on, besides the files of the model
            and the versions of the libraries.
        pack: function that quantizes the weight of the layer with a name.
    """
    first = next(iter(layers.values())).weight
    if not has_values(first) or first.device.type != "cpu":
        return {}
    stored = {name: layer for name, layer in layers.items() if is_from_files(layer.weight)}
    try:
        folder, identity = _identify(model, config, has_files=bool(stored))
    except LookupError as error:
        logger.info(
            UserText(
                "quantized weights: each rank quantizes {num_layers:layer}, and stores nothing in"
                " the cache: {reason}",
                code="quantized-by-each-rank",
                num_layers=len(layers),
                reason=error.args[0],
            )
        )
        return {}
    sizes = {name: layer.weight.numel() for name, layer in stored.items()}
    shapes = [(name, list(layer.weight.shape)) for name, layer in stored.items()]
    key = key_of(["quantized", _LAYOUT, identity, settings, shapes])
    entry = cache_dir() / "quantized" / f"{folder.resolve().name}-{config.lora.quantize}-{key}"
    return _QuantizedStore(entry, sizes, config.lora.quantize == "int8", pack).load()


def _identify(model: Any, config: Config, has_files: bool) -> tuple[Path, list[Any]]:
    """Return the folder of a model's files, and a JSON value that identifies the files and the
    libraries that read and quantize them.

    Raises:
        LookupError: quantized weights of this model are not stored. The message says why.
    """
    if config.trust_remote_code:
        raise LookupError("the model has code of its own, which may change")
    folder = config_folder(model.name_or_path) if model.name_or_path else None
    if not has_files or folder is None:
        raise LookupError("the weights were not read from a model's files")
    try:
        versions = [metadata.version(package) for package in _PACKAGES]
        return folder, [files_identity(folder), versions]
    except (OSError, metadata.PackageNotFoundError) as error:
        raise LookupError(f"the files or the libraries cannot be identified: {error}") from error


class _QuantizedStore:
    """The quantized weights of one model in the cache.

    Args:
        folder: folder of the parts.
        sizes: how many numbers each layer has, by name.
        is_int8: whether a number takes a byte; otherwise 4 bits.
        pack: function that quantizes the weight of the layer with a name.
    """

    def __init__(
        self,
        folder: Path,
        sizes: dict[str, int],
        is_int8: bool,
        pack: Callable[[str], WeightTensors],
    ) -> None:
        self._folder, self._sizes, self._is_int8, self._pack = folder, sizes, is_int8, pack
        self._parts = _divide(sizes)
        self._num_quantized = 0

    def load(self) -> dict[str, WeightTensors]:
        """Build the parts that do not exist, and read all of them."""
        began = time.monotonic()
        self._build_missing()
        weights: dict[str, WeightTensors] = {}
        for number in range(len(self._parts)):
            weights |= self._read(number)
        self._report(len(weights), time.monotonic() - began)
        return weights

    def _report(self, num_stored: int, elapsed_s: float) -> None:
        others = num_stored - self._num_quantized
        if self._num_quantized:
            rest = f"; {counted(others, 'layer')} read from there" if others else ""
            logger.info(
                UserText(
                    "quantized weights: {num_quantized:layer} quantized in {elapsed_s} s and"
                    " stored in {folder}{rest}",
                    code="quantized-weights-stored",
                    num_quantized=self._num_quantized,
                    elapsed_s=f"{elapsed_s:.1f}",
                    folder=self._folder,
                    rest=rest,
                )
            )
        elif num_stored:
            logger.info(
                UserText(
                    "quantized weights: {num_stored:layer} read from the cache: {folder}",
                    code="quantized-weights-read",
                    num_stored=num_stored,
                    folder=self._folder,
                )
            )

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number:03d}"

    def _build_missing(self) -> None:
        """Build the parts that no other process builds, and then wait for the others. Each rank of
        a host starts with another part."""
        missing = [
            number
            for number in range(len(self._parts))
            if not (self._part(number) / _FILE).is_file()
        ]
        if not missing or not self._has_room(missing):
            return
        env = from_environment()
        first = env.local_rank * len(missing) // max(env.local_world_size, 1)
        try:
            for waits in (False, True):
                for number in missing[first:] + missing[:first]:
                    self._build(number, waits)
        except (ConfigError, RunError, OSError) as error:
            self._warn_not_stored(first_line(error))

    def _build(self, number: int, waits: bool = True) -> None:
        """Build a part unless it exists.

        Args:
            waits: whether to wait if another process builds it.
        """
        if build_once(self._part(number), _FILE, partial(self._write, number), waits=waits):
            self._num_quantized += len(self._parts[number])

    def _write(self, number: int, staging: Path) -> None:
        names = self._parts[number]
        logger.debug(
            f"quantized weights: part {number} of {len(self._parts)}: {', '.join(names)}",
            extra=ON_EVERY_RANK,
        )
        tensors = {
            f"{name}.{kind}": tensor.contiguous()
            for name in names
            for kind, tensor in self._pack(name).items()
        }
        content = save(tensors, metadata={_CHECKSUM: _checksum(tensors)})
        (staging / _FILE).write_bytes(content)

    def _read(self, number: int) -> dict[str, WeightTensors]:
        """Return the weights of a part by layer, or nothing if it could not be stored. A damaged
        file is built again."""
        file = self._part(number) / _FILE
        for is_repaired in (False, True):
            if not file.is_file():
                break
            tensors, damage = _read_file(file)
            if damage is None:
                weights: dict[str, WeightTensors] = {name: {} for name in self._parts[number]}
                for key, tensor in tensors.items():
                    name, _, kind = key.rpartition(".")
                    weights[name][kind] = tensor
                return weights
            if is_repaired:
                self._warn_not_stored(f"{file} is damaged again: {damage}")
            elif not self._repair(number, damage):
                break
        return {}

    def _repair(self, number: int, damage: str) -> bool:
        """Build a damaged part again. Return False if that failed. One rank reports the damage."""
        part = self._part(number)
        try:
            if discard(part, lambda: _read_file(part / _FILE)[1] is not None):
                logger.warning(
                    UserText(
                        "quantized weights: {part} is damaged and is built again: {damage}",
                        code="quantized-weights-damaged",
                        part=part / _FILE,
                        damage=damage,
                    ),
                    extra={"is_of_this_rank": True},
                )
            self._build(number)
        except (ConfigError, RunError, OSError) as error:
            self._warn_not_stored(first_line(error))
            return False
        return True

    def _has_room(self, missing: list[int]) -> bool:
        """Return whether the missing parts fit on the disk; if not, report it."""
        size = sum(self._sizes[name] for number in missing for name in self._parts[number])
        # Of 4-bit weights, the scales are up to an eighth.
        needed = size if self._is_int8 else size * 9 // 16
        existing = next(parent for parent in self._folder.parents if parent.exists())
        free = shutil.disk_usage(existing).free
        if free < needed:
            self._warn_not_stored(
                f"{human_bytes(needed)} are needed in {cache_dir()}, and {human_bytes(free)} are"
                " free"
            )
        return free >= needed

    def _warn_not_stored(self, reason: str) -> None:
        logger.warning(
            UserText(
                "quantized weights: each rank quantizes them itself, because they cannot be stored"
                " in the cache: {reason}",
                code="quantized-weights-not-stored",
                reason=reason,
            )
        )


def _divide(sizes: dict[str, int]) -> list[list[str]]:
    """Return the names of the layers in parts, which do not depend on the number of ranks."""
    parts: list[list[str]] = []
    limit, size = sum(sizes.values()) * _PART_SHARE, 0
    for name, numbers in sizes.items():
        if not parts or size >= limit:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += numbers
    return parts


def _read_file(file: Path) -> tuple[WeightTensors, str | None]:
    """Return the tensors of a file, mapped into memory, and what is wrong with it, or None."""
    try:
        with safe_open(str(file), framework="pt") as content:
            stored = (content.metadata() or {}).get(_CHECKSUM)
            tensors = {key: content.get_tensor(key) for key in content.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        return {}, str(error)
    return tensors, None if _checksum(tensors) == stored else "its checksum is wrong"


def _checksum(tensors: WeightTensors) -> str:
    """Return the CRC-32 of the names, the shapes and the values of tensors."""
    value = 0
    for name, tensor in sorted(tensors.items()):
        value = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), value)
        value = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, value)
    return f"{value:08x}"
