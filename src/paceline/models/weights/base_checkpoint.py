"""The files of the model that a run has started from, and which of their weights a model lacks.

Transformers loads only the weights that a model's class has. A model that is saved therefore lacks
others of the base model's files, such as the layers that predict several tokens (``mtp.*``), which
servers use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError, first_line
from paceline.core.files import write_json_atomic
from paceline.models.hub_configs import find_file, read_raw_config
from paceline.models.json_config import JsonObject, read_object
from paceline.models.transformers_compat import NameMatch
from paceline.models.weights.dequantize import find_release, read_quantized, safetensors_files
from paceline.models.weights.release import QuantizedRelease
from paceline.models.weights.shards import (
    INDEX,
    STORED_DTYPES,
    TensorToWrite,
    tensor_as,
    tensor_as_stored,
)
from paceline.models.weights.stored_files import HeaderEntry, read_header

if TYPE_CHECKING:
    import torch

_FLOATS = ("F64", "F32", "BF16", "F16")
#: Last parts of the names of constants that a model computes, and that older checkpoints store.
_BUFFERS = re.compile(
    r"(^|\.)(inv_freq|original_inv_freq|masked_bias|position_ids|cos_cached|sin_cached|logn_tensor"
    r"|relative_position_index)$"
)
#: Name of a causal mask, if the tensor has the shape of one.
_MASK = re.compile(r"(^|\.)(attn|attention|crossattention)\.bias$")
_MASK_DIMS = 4


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a model's files.

    Args:
        header: its dtype and shape.
        read: function that reads it.
        unchanged: the tensor to write to another file, byte for byte.
    """

    header: HeaderEntry
    read: Callable[[], torch.Tensor]
    unchanged: TensorToWrite


@dataclass(frozen=True)
class BaseCheckpoint:
    """The files of a model.

    Args:
        name: the model's folder or hub ID.
        content: its config.json.
        tensors: tensors by name.
        release: how the files store quantized weights, if they do.
    """

    name: str
    content: JsonObject
    tensors: Mapping[str, StoredTensor]
    release: QuantizedRelease | None

    def weight_names(self) -> list[str]:
        """Return the names of the weights, without the scales of quantized ones."""
        return list(self._stored())

    def dropped(self, match: NameMatch) -> list[str]:
        """Return the names of weights that a model does not have.

        Args:
            match: the result of ``match_names`` for the model and :meth:`weight_names`.
        """
        stored = self._stored()

        def is_constant(name: str) -> bool:
            shape = self.tensors[stored[name][0]].header["shape"]
            is_mask = _MASK.search(name) is not None and len(shape) == _MASK_DIMS
            return is_mask or _BUFFERS.search(name) is not None

        return [name for name in match.unused if not is_constant(name)]

    def to_write(
        self, names: Iterable[str], dtype: torch.dtype | None, trained: torch.dtype
    ) -> dict[str, TensorToWrite]:
        """Return weights to write to another file.

        Args:
            dtype: dtype of floating-point numbers; None writes them byte for byte.
            trained: dtype of quantized weights if ``dtype`` is None.
        """
        stored = self._stored()
        return {name: self._to_write(*stored[name], dtype, trained) for name in names}

    def _stored(self) -> dict[str, tuple[str, str | None]]:
        """Return the names of each weight's tensors: of its numbers, and of its scales or None."""
        if self.release is None:
            return {name: (name, None) for name in self.tensors}
        headers = {name: tensor.header for name, tensor in self.tensors.items()}
        return dict(self.release.stored_weights(headers))

    def _to_write(
        self, numbers: str, scales: str | None, dtype: torch.dtype | None, trained: torch.dtype
    ) -> TensorToWrite:
        tensor = self.tensors[numbers]
        shape = list(tensor.header["shape"])
        if scales is not None and self.release is not None:
            if self.release.is_mxfp4:  # stored as [experts, outputs, blocks, pairs of numbers]
                shape = [shape[0], shape[2] * shape[3] * 2, shape[1]]
            read = partial(
                read_quantized, self.release, numbers, tensor.read, self.tensors[scales].read
            )
            return tensor_as(dtype or trained, shape, read)
        if dtype is None or tensor.header["dtype"] not in _FLOATS:
            return tensor.unchanged
        return tensor_as(dtype, shape, tensor.read)


def open_base(name: str) -> BaseCheckpoint:
    """Return the files of a model's folder or hub ID.

    Raises:
        ConfigError: they are not all here.
    """
    content = read_raw_config(name)
    try:
        if content is None:
            raise OSError("there is no config.json")
        tensors = _stored_tensors(name) or _pickled_tensors(name)
        if not tensors:
            raise OSError("there are no weights")
    except (OSError, ValueError) as error:
        raise ConfigError(
            "the files of the base model {model} are not complete: {reason}",
            code="base-files-missing",
            fix="restore the model's files; if only weights are gone that the trained model does"
            " not use, `paceline export --allow-missing` writes it without them",
            model=name,
            reason=first_line(error),
        ) from error
    return BaseCheckpoint(name, content, tensors, find_release(name))


def missing_weights(name: str) -> list[str]:
    """Return the tensors that the index of a model's folder lists in files that do not exist; none
    for a hub ID, whose files are downloaded."""
    content = read_object(Path(name) / INDEX) or {}
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict):
        return []
    absent = {file for file in map(str, weight_map.values()) if not (Path(name) / file).is_file()}
    return [key for key, file in weight_map.items() if str(file) in absent]


def link_present(name: str, folder: Path) -> None:
    """Link the files of a model's folder from another folder, with an index that lists only files
    that exist."""
    source = Path(name).resolve()
    for file in source.iterdir():
        if file.name != INDEX:
            (folder / file.name).symlink_to(file)
    content = read_object(source / INDEX) or {}
    missing = set(missing_weights(name))
    weight_map = content.get("weight_map")
    entries = weight_map.items() if isinstance(weight_map, dict) else ()
    present = {key: file for key, file in entries if key not in missing}
    write_json_atomic(folder / INDEX, {**content, "weight_map": present})


def _stored_tensors(name: str) -> dict[str, StoredTensor]:
    """Return the tensors of a model's safetensors files."""
    from safetensors import safe_open

    def read(file: Path, key: str) -> torch.Tensor:
        with safe_open(str(file), framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(key)
            return tensor

    result: dict[str, StoredTensor] = {}
    for file in safetensors_files(name):
        header, start = read_header(file)
        for key, entry in header.items():
            unchanged = tensor_as_stored(file, entry, start)
            result[key] = StoredTensor(entry, partial(read, file, key), unchanged)
    return result


def _pickled_tensors(name: str) -> dict[str, StoredTensor]:
    """Return the tensors of a model's ``pytorch_model.bin`` files, which are mapped into memory."""
    import torch

    index = find_file(name, "pytorch_model.bin.index.json")
    weight_map = None if index is None else (read_object(index) or {}).get("weight_map")
    names = (
        sorted({str(file) for file in weight_map.values()})
        if isinstance(weight_map, dict)
        else ["pytorch_model.bin"]
    )
    result: dict[str, StoredTensor] = {}
    for file_name in names:
        file = find_file(name, file_name)
        if file is None:
            if index is None:
                return {}
            raise OSError(f"there is no {file_name}")
        loaded = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        for key, tensor in loaded.items():
            shape = list(tensor.shape)
            unchanged = tensor_as(tensor.dtype, shape, partial(_same, tensor))
            dtype = STORED_DTYPES[str(tensor.dtype).removeprefix("torch.")]
            header = HeaderEntry(dtype=dtype, shape=shape, data_offsets=(0, unchanged.num_bytes))
            result[key] = StoredTensor(header, partial(_same, tensor), unchanged)
    return result


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
