"""Check the files of a model before a run starts, without importing libraries."""

import json
from pathlib import Path

from paceline.config.load import Loaded
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.hub import FIX, go_offline, is_hub_id, unreachable
from paceline.data.sources.opening import windows_fix, with_slashes
from paceline.models.adapters.check import fit_adapter
from paceline.models.hub_configs import cached_file
from paceline.models.json_config import JsonObject
from paceline.models.positions import fit_length
from paceline.models.weights.release import check_release
from paceline.models.weights.stored_files import IncompleteHeaderError, read_header

_WEIGHTS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model.bin.index.json",
)


def fit_to_model(loaded: Loaded) -> Loaded:
    """Give the config what the files of the model determine: the largest length, and the settings
    of an adapter whose training continues.

    Raises:
        ConfigError: a configured length exceeds a fixed limit of the model.
    """
    return fit_adapter(fit_length(loaded))


def check_files(config: Config) -> None:
    """Check the local folders of ``model`` and ``lora.adapter``.

    Raises:
        ConfigError: a folder does not exist, has invalid JSON, has no or incomplete weights, or the
            model's weights are quantized in a format that is not supported.
    """
    name = config.model
    folder = Path(with_slashes(name)).expanduser()
    if not is_hub_id(name) and not name.startswith(("builtin:", "modelscope:")):
        _check_folder(folder)
        _check_model(folder)
    check_release(config)
    if config.lora.adapter is not None:
        _check_adapter(config)


def check_hub(config: Config) -> None:
    """Check that hub IDs in ``model``, ``tokenizer`` and ``lora.adapter`` are in the cache or can
    be downloaded.

    If the hub cannot be reached, the hub libraries are switched to offline mode.

    Raises:
        ConfigError: the hub cannot be reached, and there is no cached copy.
    """
    for key, name, mark in (
        ("model", config.model, "config.json"),
        ("tokenizer", config.tokenizer, "tokenizer_config.json"),
        ("lora.adapter", config.lora.adapter, "adapter_config.json"),
    ):
        if name is None or not is_hub_id(name) or (reason := unreachable()) is None:
            continue
        go_offline()
        if cached_file(name, mark) is None:
            raise ConfigError(
                "`{key}: {name}` is not a local folder, was not downloaded before, and cannot be"
                " downloaded: {reason}",
                code="model-download-failed",
                allowed="a local folder, a hub id that was downloaded before or can be downloaded,"
                " or builtin:qwen2-tiny",
                fix=FIX,
                key=key,
                name=name,
                reason=reason,
            )


def _check_folder(folder: Path) -> None:
    if not folder.exists():
        raise ConfigError(
            "`model: {folder}` does not exist",
            code="missing-model",
            allowed="a folder with config.json and weights, a hub id such as Qwen/Qwen2.5-0.5B, or"
            " builtin:qwen2-tiny",
            fix=windows_fix(str(folder)) or "check the path",
            folder=folder,
        )
    if not folder.is_dir():
        raise ConfigError(
            "`model: {folder}` is a file",
            code="model-is-file",
            allowed="the folder that holds config.json and the weights",
            folder=folder,
        )
    if not (folder / "config.json").is_file():
        hint = ""
        if (folder / "adapter_config.json").is_file():
            base = _read_object(folder / "adapter_config.json", f"`model: {folder}`").get(
                "base_model_name_or_path"
            )
            hint = (
                f"it is a LoRA adapter: set `model: {base}` and `lora: {{enable: true, adapter:"
                f" {folder}}}`"
            )
        raise ConfigError(
            "`model: {folder}` is not a model: it has no config.json (found: {listing})",
            code="model-without-config",
            allowed="a folder that save_pretrained wrote, with config.json and weights",
            fix=hint or "check the path",
            folder=folder,
            listing=_listing(folder),
        )


def _check_model(folder: Path) -> None:
    for name in ("config.json", "adapter_config.json"):
        if (folder / name).is_file():
            _read_object(folder / name, f"`model: {folder}`")
    if (folder / "config.json").is_file() and not any(
        any(folder.glob(pattern)) for pattern in _WEIGHTS
    ):
        raise ConfigError(
            "`model: {folder}` has no weights (found: {listing})",
            code="missing-weights",
            allowed="a folder with config.json and model.safetensors (or its shards and their"
            " index)",
            fix="copy the weights too; in a repository cloned with git, run `git lfs pull`",
            folder=folder,
            listing=_listing(folder),
        )
    check_weights(folder, f"`model: {folder}`")


def check_weights(folder: Path, key: str) -> None:
    """Check that the safetensors files of a folder are complete, from their headers.

    Args:
        key: config key and its value, for the message.

    Raises:
        ConfigError: a file is missing, truncated or not a safetensors file.
    """
    files = {file.name for file in folder.glob("*.safetensors")}
    index = folder / "model.safetensors.index.json"
    if "model.safetensors" in files:
        files = {"model.safetensors"}
    elif index.is_file():
        shards = _read_object(index, key).get("weight_map")
        names = set(map(str, shards.values())) if isinstance(shards, dict) else set()
        if missing := sorted(names - files):
            raise ConfigError(
                "{key}: {num_missing} of its {num_names} weight files are missing:"
                " {missing}{detail}",
                code="missing-weight-files",
                fix="copy all files that {index} lists",
                key=key,
                num_missing=len(missing),
                num_names=len(names),
                missing=", ".join(missing[:3]),
                detail=" …" if len(missing) > 3 else "",
                index=index.name,
            )
        files = names
    for name in sorted(files):
        if reason := _damage(folder / name):
            raise ConfigError(
                "{key}: its weights cannot be read: {name} {reason}",
                code="weights-unreadable",
                allowed="complete safetensors files",
                fix="copy or download the file again",
                key=key,
                name=name,
                reason=reason,
            )


def _damage(file: Path) -> str | None:
    """Return what is wrong with a safetensors file, or None. The values are not read."""
    try:
        header, start = read_header(file)
        expected = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except IncompleteHeaderError as error:
        return str(error)
    except (ValueError, TypeError, LookupError):
        return "has an unreadable header"
    size = file.stat().st_size
    return None if size == expected else f"has {size:,} bytes instead of {expected:,}"


def _listing(folder: Path) -> str:
    return ", ".join(sorted(file.name for file in folder.iterdir())[:6]) or "nothing"


def _check_adapter(config: Config) -> None:
    name = str(config.lora.adapter)
    folder = Path(with_slashes(name)).expanduser()
    if not config.lora.enable:
        raise ConfigError(
            "`lora.adapter: {name}` requires `lora.enable: true`",
            code="adapter-without-lora",
            fix="set `lora.enable: true`, or leave `lora.adapter` out",
            name=name,
        )
    if not folder.exists() and (not is_hub_id(name) or "/" not in name):
        raise ConfigError(
            "`lora.adapter: {name}` does not exist",
            code="missing-adapter",
            allowed="the folder that peft's save_pretrained wrote (in a run of Paceline:"
            " RUN/model)",
            fix=windows_fix(name) or "check the path",
            name=name,
        )
    if folder.exists():
        if not (folder / "adapter_config.json").is_file():
            raise ConfigError(
                "`lora.adapter: {name}` has no adapter_config.json",
                code="missing-adapter-config",
                fix="give the folder that peft's save_pretrained wrote (in a run of Paceline:"
                " RUN/model)",
                name=name,
            )
        _read_object(folder / "adapter_config.json", f"`lora.adapter: {name}`")
        check_weights(folder, f"`lora.adapter: {name}`")


def _read_object(file: Path, key: str) -> JsonObject:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
        reason = f"expected an object, found a {type(content).__name__}"
    except (OSError, ValueError) as error:
        reason = str(error)
    raise ConfigError(
        "{key}: its {file} cannot be read: {reason}",
        code="model-file-unreadable",
        fix="copy the folder again",
        key=key,
        file=file.name,
        reason=reason,
    )
