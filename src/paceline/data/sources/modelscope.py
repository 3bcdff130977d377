"""Models and datasets of ModelScope, ``modelscope:OWNER/NAME``, through the optional package
`modelscope`."""

import importlib
import re

from paceline.core.errors import ConfigError, first_line

PREFIX = "modelscope:"
_ID = re.compile(r"[\w.-]+/[\w.-]+")


def download(name: str, kind: str) -> str:
    """Return the local folder of a model or dataset, downloaded if it is not in ModelScope's cache.

    Args:
        name: with the prefix.
        kind: ``model`` or ``dataset``.

    Raises:
        ConfigError: not an id, the package is not installed, or it cannot be downloaded.
    """
    repo = name.removeprefix(PREFIX).strip()
    if not _ID.fullmatch(repo):
        raise ConfigError(
            f"`{name}` does not name a {kind} of ModelScope",
            allowed=f"`{PREFIX}OWNER/NAME`, e.g. `{PREFIX}Qwen/Qwen2.5-0.5B-Instruct`",
        )
    try:
        module = importlib.import_module("modelscope.hub.snapshot_download")
    except ImportError as error:
        raise ConfigError(
            f"`{name}` needs the package `modelscope`, which is not installed",
            fix=(
                'install it with `pip install "paceline[modelscope]"`, or use a Hugging Face id or'
                " a local folder"
            ),
        ) from error
    load = getattr(
        module, "snapshot_download" if kind == "model" else "dataset_snapshot_download", None
    )
    if load is None:
        raise ConfigError(
            f"this version of `modelscope` cannot download a {kind}",
            fix="`pip install -U modelscope`",
        )
    try:
        return str(load(repo))
    except Exception as error:  # whatever its network client raises
        try:
            return str(load(repo, local_files_only=True))
        except Exception:
            raise ConfigError(
                f"`{name}` cannot be downloaded from ModelScope: {first_line(error)}",
                fix=(
                    "check the name and the network, or download it on another machine and give its"
                    " folder"
                ),
            ) from error
