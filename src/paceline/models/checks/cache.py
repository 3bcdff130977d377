"""Results of checks on a model, stored in the cache: the next run with the same model need not
repeat them. Imports no torch."""

import json
import logging
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from paceline.config.schema import Config
from paceline.core.files import cache_dir, write_json_atomic
from paceline.core.texts import UserText
from paceline.data.cache import key_of
from paceline.models.builtin import resolve_model
from paceline.models.hub_configs import config_folder
from paceline.models.weights.stored_files import files_identity

logger = logging.getLogger(__name__)

#: Increased when a check changes, so that earlier results are not used.
_LAYOUT = 4
_PACKAGES = ("paceline", "torch", "transformers", "peft")


@dataclass(frozen=True)
class StoredCheck:
    """The place of a result in the cache.

    Args:
        file: None if results of this model are not stored.
    """

    file: Path | None

    def read(self) -> Any:
        """Return the result, or None if it is not stored or cannot be read."""
        try:
            return None if self.file is None else json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def write(self, result: JsonValue) -> None:
        """Store a result. If that fails, the next run repeats the check."""
        if self.file is None:
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_json_atomic(self.file, result)
        except OSError as error:
            logger.warning(
                UserText(
                    "model: the result of a check cannot be stored in the cache: {reason}",
                    code="check-not-stored",
                    reason=error,
                )
            )


def check_of_config(name: str, config: Config, *parts: object) -> StoredCheck:
    """Return the place of the result of a check that builds the model of a config.

    A result is valid for the adapters, the attention and the kernels of the config, and for the
    versions of the libraries. It is not stored for a model with code of its own, which may change.

    Args:
        name: name of the check.
        parts: JSON values that the result depends on, too.
    """
    if config.trust_remote_code:
        return StoredCheck(None)
    try:
        versions = [metadata.version(package) for package in _PACKAGES]
    except metadata.PackageNotFoundError:
        return StoredCheck(None)
    lora = {**config.lora.model_dump(mode="json"), "set": sorted(config.lora.model_fields_set)}
    args = config.train_args
    settings = [args.attn_implementation, args.use_liger_kernel]
    key = key_of(["check", _LAYOUT, name, versions, lora, settings, parts])
    return StoredCheck(cache_dir() / "checks" / f"{key}.json")


def check_of_model(name: str, model: Any, config: Config, *parts: object) -> StoredCheck:
    """Return the place of the result of a check that runs the model of a config.

    Besides :func:`check_of_config`, a result is valid for the files of the model, the classes of
    its modules, and the devices and dtypes of its parameters. It is not stored if tensors have no
    values.
    """
    from paceline.distributed import torch_compat

    parameters = list(model.parameters())
    folder = config_folder(str(Path(resolve_model(config.model)).expanduser()))
    if folder is None or not torch_compat.has_values(parameters[0]):
        return StoredCheck(None)
    classes = {f"{type(module).__module__}.{type(module).__name__}" for module in model.modules()}
    tensors = {f"{parameter.device.type} {parameter.dtype}" for parameter in parameters}
    return check_of_config(
        name,
        config,
        *(files_identity(folder), sorted(classes), sorted(tensors)),
        *(config.train_args.precision, *parts),
    )
