"""Compare the file of an adapter to the model that it continues on, by names and shapes."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.formatting import counted
from paceline.models.hub_configs import cached_file

_FILE = "adapter_model.safetensors"
_MAX_LISTED = 4
Shape = tuple[int, ...]


def check_stored_adapter(adapted: Any, folder: str, key: str) -> None:
    """Check that the file of an adapter has the weights of all adapters of the model, and no
    others. Reads no values; the model may be on the meta device.

    Args:
        folder: local folder, or hub ID in the cache. A file that is not found passes.
        key: the setting with its value, for messages.

    Raises:
        ConfigError: the file belongs to another model.
    """
    from peft import get_peft_model_state_dict

    file = Path(folder) / _FILE
    if not file.is_file():
        cached = cached_file(folder, _FILE) if not Path(folder).is_dir() else None
        if cached is None:
            return
        file = Path(cached)
    stored = _loaded_shapes(adapted, _stored_shapes(file))
    state = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    expected = {name: tuple(tensor.shape) for name, tensor in state.items()}
    _compare(stored, expected, key)


def _stored_shapes(file: Path) -> dict[str, Shape]:
    from safetensors import safe_open

    with safe_open(file, "pt") as content:
        return {name: tuple(content.get_slice(name).get_shape()) for name in content.keys()}  # noqa: SIM118


def _loaded_shapes(adapted: Any, stored: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the names and shapes that peft gives the tensors of a file when it loads them: it
    stacks the adapters of single experts, as files of older versions have them."""
    import torch
    from peft.utils.transformers_weight_conversion import (
        convert_peft_adapter_state_dict_for_transformers,
    )

    tensors = {name: torch.empty(shape, device="meta") for name, shape in stored.items()}
    loaded = convert_peft_adapter_state_dict_for_transformers(
        adapted, adapted.peft_config[adapted.active_adapter], tensors, adapted.active_adapter
    )
    return {name: tuple(tensor.shape) for name, tensor in loaded.items()}


def _compare(stored: Mapping[str, Shape], expected: Mapping[str, Shape], key: str) -> None:
    problems: list[str] = []
    if absent := [name for name in expected if name not in stored]:
        problems.append(
            f"it has no weights for {counted(len(absent), 'tensor')} of {len(expected)}"
            f" ({_listed(absent)})"
        )
    if unknown := [name for name in stored if name not in expected]:
        problems.append(
            f"the model has no place for {counted(len(unknown), 'tensor')} of it"
            f" ({_listed(unknown)})"
        )
    different = [name for name in expected if name in stored and stored[name] != expected[name]]
    if different:
        first = different[0]
        problems.append(
            f"{counted(len(different), 'tensor')} of it {'has' if len(different) == 1 else 'have'}"
            f" another shape ({_plain(first)}: {list(stored[first])} in the file,"
            f" {list(expected[first])} in the model)"
        )
    if problems:
        raise ConfigError(
            "{key} does not fit the model: {problems}",
            code="adapter-of-another-model",
            fix="give the adapter of this model, or the model that the adapter was trained on",
            key=key,
            problems="; ".join(problems),
        )


def _plain(name: str) -> str:
    return name.removeprefix("base_model.model.")


def _listed(names: Iterable[str]) -> str:
    names = [_plain(name) for name in names]
    rest = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + rest
