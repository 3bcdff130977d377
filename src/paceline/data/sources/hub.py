"""Datasets on the Hugging Face hub, through the `datasets` library; what cannot be had fails within
seconds."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError, first_line
from paceline.core.files import cache_dir, write_json_atomic
from paceline.core.hub import FIX, go_offline, unreachable

_TIMEOUT_S = 10.0


@dataclass
class HubDataset:
    """One split of a hub dataset. ``name`` is its configuration, ``revision`` the commit that
    :meth:`find` saw."""

    repo: str
    name: str | None
    split: str
    revision: str | None = None
    offline: bool = False
    _loaded: Any = field(default=None, repr=False)

    def check(self) -> None:
        """Raise ConfigError if the hub cannot be reached and no copy was downloaded before."""
        reason = unreachable()
        if reason is not None and not self._memo().is_file():
            raise self._error(reason, FIX)

    def find(self) -> list[tuple[str, str]]:
        """Ask the hub which commit is current; without a network use the commit seen last. Returns
        notices.

        Raises:
            ConfigError: the hub has no such dataset, or it cannot be reached and no copy was
                downloaded before.
        """
        offline = unreachable()
        if offline is not None:
            go_offline()
            return self._without_network(offline, None)
        from huggingface_hub import HfApi
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        try:
            self.revision = HfApi().dataset_info(self.repo, timeout=_TIMEOUT_S).sha
        except GatedRepoError as error:
            raise self._error(
                "its authors ask you to accept their terms first", "accept them and log in"
            ) from error
        except RepositoryNotFoundError as error:
            raise self._error("the hub has no dataset of that name, or it is private") from error
        except Exception as error:  # every kind of network trouble: each client library has its own
            reason = (
                "offline mode is on"
                if type(error).__name__ == "OfflineModeIsEnabled"
                else first_line(error)
            )
            return self._without_network(reason, error)
        self._memo().parent.mkdir(parents=True, exist_ok=True)
        write_json_atomic(self._memo(), {"repo": self.repo, "revision": self.revision})
        return []

    def _without_network(self, reason: str, error: Exception | None) -> list[tuple[str, str]]:
        self.offline = True
        try:
            self.revision = json.loads(self._memo().read_text())["revision"]
        except (OSError, ValueError, KeyError):
            raise self._error(reason, FIX) from error
        return [("warning", f"{self.repo}: {reason}; using the copy downloaded before")]

    def _memo(self) -> Path:
        return cache_dir() / "hub" / f"{self.repo.replace('/', '--')}.json"

    def _error(self, reason: str, fix: str = "") -> ConfigError:
        return ConfigError(
            f"the dataset `{self.repo}` cannot be downloaded from the Hugging Face hub: {reason}",
            allowed=(
                "a local file or folder (JSON, JSON lines, CSV, Parquet, text), a hub id that this"
                " machine can reach, or builtin:python-docs"
            ),
            fix=(f"{fix}; or " if fix and fix != FIX else "")
            + (
                f"{FIX}: `dataset=/path/to/data`"
                if fix == FIX
                else "download it on another machine: `dataset=/path/to/data`"
            ),
        )

    def fingerprint(self) -> list[Any]:
        """What tells this split from any other, without reading it."""
        return [self.repo, self.name, self.split, self.revision]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Rows in order, downloaded on first use.

        Raises:
            ConfigError: no such configuration or split (those there are, are named), or the
                download failed.
        """
        if self._loaded is None:
            self._loaded = self._load()
        for batch in self._loaded.iter(batch_size=1000):
            names = list(batch)
            for values in zip(*batch.values(), strict=True):
                yield dict(zip(names, values, strict=True))

    def _load(self) -> Any:
        import datasets

        datasets.disable_progress_bars()
        if self.offline:
            datasets.config.HF_HUB_OFFLINE = True
        try:
            return datasets.load_dataset(
                self.repo, self.name, split=self.split, revision=self.revision
            )
        except Exception as error:  # the library and its network clients raise all kinds
            reason = (
                (str(error).strip() or type(error).__name__).replace("\n", " ")[:300].rstrip(".")
            )
            raise self._error(
                reason,
                "name the configuration or split: `dataset: {path: "
                + self.repo
                + ", name: ..., split: ...}`",
            ) from error
