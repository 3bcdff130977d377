"""Files at a URL (through fsspec) and on the Hugging Face hub: list them, and download one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from paceline.config.schema.data import DatasetSource
from paceline.core.errors import ConfigError, RunError, first_line
from paceline.core.files import cache_dir
from paceline.core.log import Notice
from paceline.data.cache import build_once, key_of
from paceline.data.sources.opening import is_pattern
from paceline.data.sources.readers import is_table
from paceline.data.sources.splits import choose_files

_FILE = "data"


def list_files(url: str, is_data: Callable[[Path], bool] = is_table) -> list[str]:
    """Return the URLs of the data files at ``url``: a file, a pattern, or all data files below a
    folder, sorted.

    Args:
        is_data: whether a file is a data file, by its name.

    Raises:
        ConfigError: the location cannot be read or has no data files, or a package is missing.
    """
    fs, path = _filesystem(url)
    try:
        if any(char in path for char in "*?["):
            paths = fs.glob(path)
        elif fs.isfile(path):
            return [url]
        else:
            paths = fs.find(path)
    except Exception as error:  # each store's library raises errors of its own
        raise _unreachable(url, error) from error
    files = sorted(str(fs.unstrip_protocol(name)) for name in paths if is_data(Path(name)))
    if not files:
        raise ConfigError(f"`{url}` has no data files", fix="check the URL")
    return files


def find_remote(
    url: str, spec: DatasetSource, is_data: Callable[[Path], bool] = is_table
) -> tuple[list[str], list[Notice]]:
    """Return the URLs of :func:`list_files` (those of a folder only of the split that ``spec``
    selects), and messages about the others.

    Raises:
        ConfigError: as :func:`list_files`; or no file belongs to the split.
    """
    files = list_files(url, is_data)
    if files == [url] or is_pattern(url):
        return files, []
    folder = _path_of(url)
    by_name = {_path_of(file).removeprefix(f"{folder}/"): file for file in files}
    chosen, notices = choose_files(list(by_name), spec, url)
    return [by_name[name] for name in chosen], notices


def _path_of(url: str) -> str:
    return url.partition("://")[2].strip("/")


def identity(url: str) -> list[Any]:
    """Return values that identify the version of a remote file."""
    fs, path = _filesystem(url)
    try:
        info = fs.info(path)
    except Exception as error:
        raise _unreachable(url, error) from error
    marks = [str(info[key]) for key in ("ETag", "etag", "blob_id", "mtime") if info.get(key)]
    return [url, info.get("size"), marks]


def fetch(url: str) -> Path:
    """Return the local copy of a remote file, which is downloaded if it is not in the cache. One
    process of a host downloads it, the others wait.

    Raises:
        RunError: the file cannot be downloaded.
    """
    name = PurePosixPath(url).name
    folder = cache_dir() / "shards" / key_of(identity(url))

    def download(staging: Path) -> None:
        fs, path = _filesystem(url)
        try:
            fs.get_file(path, str(staging / name))
        except Exception as error:
            raise RunError(
                f"`{url}` cannot be downloaded: {first_line(error)}",
                fix="check the network and run the command again; the run resumes",
            ) from error

    build_once(folder, name, download)
    return folder / name


def _filesystem(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    try:
        fs, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"`{url}` cannot be opened: {first_line(error)}",
            fix="install the package that fsspec needs for it, such as `pip install paceline[s3]`",
        ) from error
    return fs, path


def _unreachable(url: str, error: Exception) -> ConfigError:
    reason = first_line(error) if str(error) else type(error).__name__
    return ConfigError(f"`{url}` cannot be read: {reason}", fix="check the URL and the network")
