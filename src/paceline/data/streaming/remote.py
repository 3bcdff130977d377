"""Files at a URL (through fsspec) and on the Hugging Face hub: list them, and download one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from paceline.core.errors import ConfigError, RunError, first_line
from paceline.core.files import cache_dir
from paceline.data.cache import build_once, key_of


class RemoteFolder:
    """A folder at a URL, as :class:`paceline.data.sources.folder.DataFolder` describes it.

    Raises:
        ConfigError: the package for the URL is missing.
    """

    def __init__(self, url: str) -> None:
        self.label = url
        self._fs, path = _filesystem(url)
        self._path = path.rstrip("/")

    def names(self) -> list[str]:
        """Return the names of all files, sorted.

        Raises:
            ConfigError: the location cannot be read.
        """
        return self._below(lambda: self._fs.find(self._path))

    def matches(self, pattern: str) -> list[str]:
        """Return the names of the files that match a pattern, sorted.

        Raises:
            ConfigError: the location cannot be read.
        """
        return self._below(lambda: self._fs.glob(f"{self._path}/{pattern}"))

    def read(self, name: str) -> str | None:
        """Return the text of a file, or None if there is none.

        Raises:
            ConfigError: the location cannot be read.
        """
        try:
            content: bytes = self._fs.cat_file(f"{self._path}/{name}")
        except FileNotFoundError:
            return None
        except Exception as error:  # each store's library raises errors of its own
            raise _unreachable(self.label, error) from error
        return content.decode("utf-8", errors="replace")

    def url(self, name: str) -> str:
        """Return the URL of a file."""
        return str(self._fs.unstrip_protocol(f"{self._path}/{name}"))

    def _below(self, find: Callable[[], list[str]]) -> list[str]:
        try:
            paths = find()
        except Exception as error:  # each store's library raises errors of its own
            raise _unreachable(self.label, error) from error
        return sorted(path.removeprefix(f"{self._path}/") for path in paths)


def find_remote(url: str, is_data: Callable[[Path], bool]) -> list[str] | RemoteFolder:
    """Return the URL of a file, the sorted URLs of the files that match a pattern, or the folder at
    ``url``.

    Args:
        is_data: whether a file is a data file, by its name.

    Raises:
        ConfigError: the location cannot be read, a pattern matches no data files, or a package is
            missing.
    """
    fs, path = _filesystem(url)
    try:
        characters = "*[" if _is_web(url) else "*?["  # in a web address `?` begins the query
        if not any(character in path for character in characters):
            # A web server answers for a folder as for a file.
            is_named = is_data(Path(name_of(url)))
            is_file = fs.isfile(path) and (is_named or not fs.isdir(path))
            return [url] if is_file else RemoteFolder(url)
        paths = fs.glob(path)
    except Exception as error:  # each store's library raises errors of its own
        raise _unreachable(url, error) from error
    files = sorted(str(fs.unstrip_protocol(name)) for name in paths if is_data(Path(name)))
    if not files:
        raise ConfigError(
            "`{url}` has no data files", code="no-files-at-url", fix="check the URL", url=url
        )
    return files


def _is_web(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def name_of(url: str) -> str:
    """Return the name of the file at a URL, without the query of a web address."""
    name = PurePosixPath(url).name
    return name.partition("?")[0] if _is_web(url) else name


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
    name = name_of(url)
    folder = cache_dir() / "shards" / key_of(identity(url))

    def download(staging: Path) -> None:
        fs, path = _filesystem(url)
        try:
            fs.get_file(path, str(staging / name))
        except Exception as error:
            raise RunError(
                "`{url}` cannot be downloaded: {reason}",
                code="url-download-failed",
                fix="check the network and run the command again; the run resumes",
                url=url,
                reason=first_line(error),
            ) from error

    build_once(folder, name, download)
    return folder / name


def _filesystem(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    try:
        fs, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            "`{url}` cannot be opened: {reason}",
            code="url-not-opened",
            fix="install the package that fsspec needs for it, such as `pip install paceline[s3]`",
            url=url,
            reason=first_line(error),
        ) from error
    return fs, path


def _unreachable(url: str, error: Exception) -> ConfigError:
    reason = first_line(error) if str(error) else type(error).__name__
    return ConfigError(
        "`{url}` cannot be read: {reason}",
        code="url-unreadable",
        fix="check the URL and the network",
        url=url,
        reason=reason,
    )
