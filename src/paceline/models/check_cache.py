"""Results of checks on a model, stored in the cache: a check takes several forward passes through
the whole model, which the next run with the same model need not repeat."""

import logging
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paceline.config.schema import Config
from paceline.core.files import cache_dir, write_json_atomic
from paceline.data.cache import key_of
from paceline.distributed import torch_compat
from paceline.models.builtin import resolve_model
from paceline.models.files import files_identity
from paceline.models.hub_configs import config_folder
from paceline.models.json_config import read_object

logger = logging.getLogger(__name__)

#: Increased when a check changes, so that earlier results are not used.
_LAYOUT = 1
_PACKAGES = ("paceline", "torch", "transformers", "peft")
#: Keys of ``train_args`` on which the computations of a model depend.
_SETTINGS = ("attn_implementation", "precision", "use_liger_kernel")


@dataclass(frozen=True)
class StoredCheck:
    """The place of a result in the cache.

    Args:
        file: None if results of this model are not stored.
    """

    file: Path | None

    def read(self) -> dict[str, Any] | None:
        """Return the result, or None if it is not stored or cannot be read."""
        return None if self.file is None else read_object(self.file)

    def write(self, result: dict[str, Any]) -> None:
        """Store a JSON value. If that fails, the next run repeats the check."""
        if self.file is None:
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_json_atomic(self.file, result)
        except OSError as error:
            logger.warning(f"model: the result of a check cannot be stored in the cache: {error}")


def find_stored(name: str, model: Any, config: Config, *parts: str) -> StoredCheck:
    """Return the place of the result of a check.

    A result is valid for the files of the model, the classes and dtypes in it, the settings on
    which its computations depend, and the versions of the libraries. It is not stored for a model
    with code of its own, which may change, or whose tensors have no values.

    Args:
        name: name of the check.
        parts: what else the result depends on.
    """
    parameters = list(model.parameters())
    folder = config_folder(str(Path(resolve_model(config.model)).expanduser()))
    if folder is None or config.trust_remote_code or not torch_compat.has_values(parameters[0]):
        return StoredCheck(None)
    key = key_of(
        [
            *("check", _LAYOUT, name, parts, files_identity(folder)),
            sorted(
                {f"{type(module).__module__}.{type(module).__name__}" for module in model.modules()}
            ),
            sorted({f"{parameter.device.type} {parameter.dtype}" for parameter in parameters}),
            config.lora.model_dump(mode="json"),
            [getattr(config.train_args, setting) for setting in _SETTINGS],
            [version(package) for package in _PACKAGES],
        ]
    )
    return StoredCheck(cache_dir() / "checks" / f"{key}.json")
