"""Datasets on the Hugging Face hub, through the `datasets` library, and the names that people know
them by; what cannot be had fails within seconds."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError, first_line
from paceline.core.files import cache_dir, write_json_atomic
from paceline.core.hub import FIX, go_offline, unreachable
from paceline.data.sources.rows import Row

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

    def rows(self) -> Iterator[Row]:
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


@dataclass(frozen=True)
class DatasetAlias:
    """A dataset on the hub; ``name`` is its configuration, ``split`` the split used where none is
    asked for."""

    repo: str
    name: str | None = None
    split: str | None = None


HUB_NAMES: dict[str, DatasetAlias] = {
    # instructions
    "alpaca": DatasetAlias("tatsu-lab/alpaca"),
    "alpaca-en": DatasetAlias("tatsu-lab/alpaca"),
    "alpaca-en-demo": DatasetAlias("llamafactory/alpaca_en"),
    "alpaca-zh": DatasetAlias("llamafactory/alpaca_zh"),
    "alpaca-zh-demo": DatasetAlias("llamafactory/alpaca_zh"),
    "alpaca-cleaned": DatasetAlias("yahma/alpaca-cleaned"),
    "alpaca-gpt4": DatasetAlias("vicgalle/alpaca-gpt4"),
    "alpaca-gpt4-en": DatasetAlias("llamafactory/alpaca_gpt4_en"),
    "alpaca-gpt4-zh": DatasetAlias("llamafactory/alpaca_gpt4_zh"),
    "dolly": DatasetAlias("databricks/databricks-dolly-15k"),
    "dolly-15k": DatasetAlias("databricks/databricks-dolly-15k"),
    "belle-1m": DatasetAlias("BelleGroup/train_1M_CN"),
    "code-alpaca": DatasetAlias("sahil2801/CodeAlpaca-20k"),
    "open-orca": DatasetAlias("Open-Orca/OpenOrca"),
    "lima": DatasetAlias("GAIR/lima"),
    # chats
    "sharegpt": DatasetAlias("RyokoAI/ShareGPT52K"),
    "guanaco": DatasetAlias("timdettmers/openassistant-guanaco"),
    "oasst": DatasetAlias("timdettmers/openassistant-guanaco"),
    "openhermes": DatasetAlias("teknium/OpenHermes-2.5"),
    "openhermes-2.5": DatasetAlias("teknium/OpenHermes-2.5"),
    "ultrachat": DatasetAlias("HuggingFaceH4/ultrachat_200k", split="train_sft"),
    "ultrachat-200k": DatasetAlias("HuggingFaceH4/ultrachat_200k", split="train_sft"),
    "slimorca": DatasetAlias("Open-Orca/SlimOrca"),
    "capybara": DatasetAlias("trl-lib/Capybara"),
    "no-robots": DatasetAlias("HuggingFaceH4/no_robots"),
    "smoltalk": DatasetAlias("HuggingFaceTB/smoltalk", "all"),
    "tulu-3": DatasetAlias("allenai/tulu-3-sft-mixture"),
    # mathematics
    "gsm8k": DatasetAlias("openai/gsm8k", "main"),
    "metamathqa": DatasetAlias("meta-math/MetaMathQA"),
    "openr1-math": DatasetAlias("open-r1/OpenR1-Math-220k", "default"),
    # plain text
    "wikitext": DatasetAlias("Salesforce/wikitext", "wikitext-2-raw-v1"),
    "wikitext-2": DatasetAlias("Salesforce/wikitext", "wikitext-2-raw-v1"),
    "wikitext-103": DatasetAlias("Salesforce/wikitext", "wikitext-103-raw-v1"),
    "tinystories": DatasetAlias("roneneldan/TinyStories"),
    "fineweb-sample": DatasetAlias("HuggingFaceFW/fineweb", "sample-10BT"),
    "fineweb-edu-sample": DatasetAlias("HuggingFaceFW/fineweb-edu", "sample-10BT"),
    "cosmopedia-sample": DatasetAlias("HuggingFaceTB/cosmopedia-100k"),
}


def find_hub_name(name: str) -> DatasetAlias | None:
    """The dataset that ``name`` stands for; case, dashes, underscores and blanks do not matter."""
    return _BY_PLAIN.get(_plain(name))


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]", "", name.lower())


_BY_PLAIN = {_plain(name): dataset for name, dataset in HUB_NAMES.items()}
