"""Find the files of a model in a folder, in the hub's cache or on the hub, and read its config.json
without network access, also from a table of well-known models. Imports no torch."""

import contextlib
import json
from functools import cache
from importlib.resources import files
from pathlib import Path

from pydantic import JsonValue

from paceline.core.hub import is_hub_id, unreachable
from paceline.models.json_config import read_object
from paceline.models.qwen import as_qwen2_config


def canonical_id(name: str) -> str:
    """Return the hub's spelling of a well-known ID (``qwen/qwen-7b`` → ``Qwen/Qwen-7B``), or any
    other name unchanged."""
    if Path(name).expanduser().exists():
        return name
    return _table().get(name.lower(), (name, {}))[0]


def known_ids() -> list[str]:
    """Return the hub IDs whose config.json is in the table."""
    return [model_id for model_id, _ in _table().values()]


def read_config(name: str) -> dict[str, JsonValue] | None:
    """Return the config.json of a folder or hub ID as transformers reads it, or None if it would
    have to be downloaded.

    The config of a first-generation Qwen model is converted to a config of Qwen2, the architecture
    in which it is trained.

    Raises:
        ConfigError: a first-generation Qwen model cannot be converted.
    """
    content = read_raw_config(name)
    return content if content is None else as_qwen2_config(content, name)


def read_raw_config(name: str) -> dict[str, JsonValue] | None:
    """Return the stored config.json, without the conversion of :func:`read_config`."""
    folder = config_folder(name)
    if folder is not None:
        return read_object(folder / "config.json")
    entry = _table().get(name.lower())
    return None if entry is None else dict(entry[1])


def config_folder(name: str) -> Path | None:
    """Return the local folder that contains the config.json of ``name`` (the folder itself, or its
    snapshot in the hub's cache), or None if there is none."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    file = cached_file(name, "config.json")
    return None if file is None else file.parent


def cached_file(name: str, file_name: str) -> Path | None:
    """Return the path of a hub ID's file in the hub's cache, or None if it is not cached."""
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(canonical_id(name), file_name)
    except ValueError:  # not the name of a repository
        return None
    return Path(cached) if isinstance(cached, str) else None


def find_file(name: str, file_name: str) -> Path | None:
    """Return a file of a model's folder or hub ID, which is downloaded if necessary; None if the
    model has no such file, or if it cannot be downloaded because the hub is offline.

    Raises:
        OSError: the hub refuses access to the model and the file is not cached.
    """
    folder = Path(name).expanduser()
    if folder.exists():
        return folder / file_name if (folder / file_name).is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    try:
        return Path(hf_hub_download(canonical_id(name), file_name))
    except EntryNotFoundError:
        return None
    except HfHubHTTPError:
        if (cached := cached_file(name, file_name)) is None:
            raise
        return cached


def download_config(name: str) -> None:
    """Try to download the config.json of a hub ID to the hub's cache.

    Failures are ignored: the code that needs the file reports them.
    """
    from huggingface_hub import hf_hub_download

    # Each client library raises its own types of network errors.
    with contextlib.suppress(Exception):
        hf_hub_download(canonical_id(name), "config.json")


@cache
def fetch_config(name: str) -> None:
    """Download the config.json of a hub ID if it is neither in the hub's cache nor in the table of
    well-known models, and the hub can be reached. Tried once per process."""
    if is_hub_id(name) and read_raw_config(name) is None and unreachable() is None:
        download_config(name)


@cache
def _table() -> dict[str, tuple[str, dict[str, JsonValue]]]:
    """Return {hub ID in lower case: (hub ID, fields of its config.json)}."""
    content = json.loads(
        (files("paceline.models") / "hub_configs.json").read_text(encoding="utf-8")
    )
    return {
        model_id.lower(): (model_id, row["config"])
        for row in content["models"]
        for model_id in row["ids"]
    }
