"""Check a location of checkpoints, without connecting to it. Imports no torch."""

import importlib.util
from urllib.parse import urlsplit

from paceline.core.errors import ConfigError

#: URL scheme → (package that fsspec needs for it, extra of Paceline that installs it, or None)
_PACKAGES: dict[str, tuple[str, str | None]] = {
    "s3": ("s3fs", "s3"),
    "s3a": ("s3fs", "s3"),
    "gs": ("gcsfs", None),
}


def is_url(text: str) -> bool:
    """Return whether a location is a URL rather than a folder."""
    return "://" in text


def check_url(key: str, text: str) -> None:
    """Check the location ``text``, without connecting to it.

    Raises:
        ConfigError: the URL contains credentials or is not supported, or a required package is not
            installed.
    """
    if not is_url(text):
        return
    parts = urlsplit(text)
    if "@" in parts.netloc:
        raise ConfigError(
            "`{key}` contains credentials, which would be written to config.yaml",
            code="credentials-in-url",
            fix="remove them from the URL and set them in the environment (`AWS_ACCESS_KEY_ID`,"
            " `AWS_SECRET_ACCESS_KEY`, a profile or a role)",
            key=key,
        )
    if parts.scheme not in _PACKAGES:
        raise ConfigError(
            "`{key}: {text}`: unsupported URL scheme {scheme}",
            code="unsupported-url-scheme",
            allowed=(
                "a folder, or a URL that begins with "
                + ", ".join(f"{scheme}://" for scheme in _PACKAGES)
            ),
            key=key,
            text=text,
            scheme=f"{parts.scheme!r}",
        )
    if not parts.netloc:
        raise ConfigError(
            "`{key}: {text}` has no bucket name",
            code="missing-bucket",
            allowed="{scheme}://BUCKET/PREFIX",
            key=key,
            text=text,
            scheme=parts.scheme,
        )
    package, extra = _PACKAGES[parts.scheme]
    if importlib.util.find_spec(package) is None:
        install = f"paceline[{extra}]" if extra else package
        raise ConfigError(
            "`{key}: {text}` requires the package {package}",
            code="missing-storage-package",
            fix="`pip install '{install}'`",
            key=key,
            text=text,
            package=package,
            install=install,
        )
