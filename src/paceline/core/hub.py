"""Check once, within two seconds, whether the Hugging Face hub can be reached.

The hub's client retries every request for half a minute, which is too long to detect that a machine
has no network.
"""

import importlib
import os
import re
import socket
import sys
import threading
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

#: Environment variables of huggingface_hub, transformers and datasets that disable all requests.
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
FIX = (
    "connect to a network; or set HF_ENDPOINT to a mirror that this machine can reach; or download"
    " it on another machine and give its folder"
)
_TIMEOUT_S = 1.5
_FILE_SUFFIXES = (
    *(".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow"),
    *(".txt", ".gz", ".bz2", ".xz", ".zst", ".py"),
)
#: Characters that hub IDs do not have. A colon is in the names of built-in models and of
#: ModelScope, and in drives of Windows.
_NOT_HUB = re.compile(r"[:\\\x00-\x1f]")


def endpoint() -> str:
    """Return the address of the hub: ``HF_ENDPOINT``, or the public one."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def is_hub_id(name: str) -> bool:
    """Return whether the name of a model or a dataset refers to the hub, not to a built-in one, to
    ModelScope or to a path."""
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or _NOT_HUB.search(name):
        return False
    return not Path(name).expanduser().exists()


def cached_models() -> list[str]:
    """Return the IDs of the models in the hub's cache, sorted."""
    environment = os.environ
    home = environment.get("HF_HOME") or Path(
        environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    cache = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    folder = Path(cache or Path(home, "hub")).expanduser()
    configs = folder.glob("models--*/snapshots/*/config.json")
    return sorted(
        {path.parents[2].name.removeprefix("models--").replace("--", "/") for path in configs}
    )


def is_path(name: str) -> bool:
    """Return whether the name of a model or a dataset can only be a path: it begins like one, has
    several slashes, or ends like a data file."""
    if _NOT_HUB.search(name):
        return False
    begins_like_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    return begins_like_path or Path(name).suffix.lower() in _FILE_SUFFIXES


def modelscope_name(name: str) -> str:
    """Return a hub ID, perhaps with ``#N``, as the ID on ModelScope; any other name unchanged."""
    place = name.partition("#")[0]
    is_file = Path(place).suffix.lower() in _FILE_SUFFIXES
    return (
        f"modelscope:{name}" if place.count("/") == 1 and not is_file and is_hub_id(place) else name
    )


@cache
def unreachable() -> str | None:
    """Return why the hub cannot be reached, or None if it can. A server that responds with an error
    counts as reachable."""
    for name in OFFLINE_VARIABLES:
        if os.environ.get(name, "").strip().upper() in ("1", "ON", "YES", "TRUE"):
            return f"offline mode is on ({name}={os.environ[name]})"
    parts = urlsplit(endpoint())
    if parts.hostname is None:
        return f"expected HF_ENDPOINT to be a URL such as https://hf-mirror.com, not {endpoint()}"
    proxy_url = getproxies().get(parts.scheme) or getproxies().get("all")
    if proxy_url and not proxy_bypass(parts.hostname):
        proxy = urlsplit(proxy_url if "://" in proxy_url else f"http://{proxy_url}")
        if proxy.hostname is None:
            return None  # unknown form: the client handles it
        return _problem(proxy.hostname, proxy.port or 80, f"the proxy {proxy.hostname}")
    return _problem(
        parts.hostname, parts.port or (80 if parts.scheme == "http" else 443), endpoint()
    )


def _problem(host: str, port: int, name: str) -> str | None:
    """Return why no connection to ``host`` can be opened, or None. The connection is tried in a
    thread, because resolving a name has no timeout."""
    outcome: list[str | None] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=_TIMEOUT_S).close()
            outcome.append(None)
        except OSError as error:
            outcome.append(error.strerror or str(error))

    thread = threading.Thread(target=connect, name="hub-probe", daemon=True)
    thread.start()
    thread.join(_TIMEOUT_S + 0.5)
    reason = outcome[0] if outcome else "no answer"
    return None if reason is None else f"{name} cannot be reached from this machine ({reason})"


def go_offline() -> None:
    """Make the hub libraries in this process use their caches and send no requests."""
    constants = importlib.import_module("huggingface_hub.constants")
    constants.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    if "datasets.config" in sys.modules:
        sys.modules["datasets.config"].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]


def go_offline_if_unreachable(name: str) -> None:
    """Go offline if ``name`` is on the hub and the hub cannot be reached, so that libraries do not
    retry."""
    if is_hub_id(name) and unreachable() is not None:
        go_offline()
