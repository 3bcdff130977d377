"""Datasets on the Hugging Face hub and their well-known names; downloads from ModelScope. Fails
within seconds if a hub cannot be reached."""

import importlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError, first_line
from paceline.core.files import cache_dir, write_json_atomic
from paceline.core.hub import FIX, go_offline, unreachable
from paceline.core.log import Notice
from paceline.core.texts import UserText
from paceline.data.sources.rows import Row, struct_columns, without_added_nulls

MODELSCOPE_PREFIX = "modelscope:"
_TIMEOUT_S = 10.0


@dataclass
class HubDataset:
    """One split of a hub dataset.

    Args:
        name: the dataset's configuration.
        revision: the commit, set by :meth:`find`.
    """

    repo: str
    name: str | None
    split: str
    revision: str | None = None
    offline: bool = False
    _loaded: Any = field(default=None, repr=False)

    def check(self) -> None:
        """Raise ConfigError if the hub cannot be reached and there is no downloaded copy."""
        reason = unreachable()
        if reason is not None and not self._record().is_file():
            raise self._error(reason, FIX)

    def find(self) -> list[Notice]:
        """Look up the current commit on the hub; without a network, use the last known commit.

        Raises:
            ConfigError: the hub has no such dataset, or it cannot be reached and there is no
                downloaded copy.
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
                "access requires accepting its terms on the hub", "accept them and log in"
            ) from error
        except RepositoryNotFoundError as error:
            raise self._error("dataset not found on the hub, or it is private") from error
        except Exception as error:  # each client library raises network errors of its own
            if type(error).__name__ == "OfflineModeIsEnabled":
                return self._without_network("offline mode is on", error)
            return self._without_network(first_line(error), error)
        self._record().parent.mkdir(parents=True, exist_ok=True)
        write_json_atomic(self._record(), {"repo": self.repo, "revision": self.revision})
        return []

    def _without_network(self, reason: str, error: Exception | None) -> list[Notice]:
        self.offline = True
        try:
            self.revision = json.loads(self._record().read_text())["revision"]
        except (OSError, ValueError, KeyError):
            raise self._error(reason, FIX) from error
        return [
            Notice(
                "warning",
                UserText(
                    "{repo}: {reason}; using the downloaded copy",
                    code="downloaded-copy-used",
                    repo=self.repo,
                    reason=reason,
                ),
            )
        ]

    def _record(self) -> Path:
        """Return the path of the file that records the last known commit."""
        return cache_dir() / "hub" / f"{self.repo.replace('/', '--')}.json"

    def _error(self, reason: str, fix: str = "") -> ConfigError:
        if fix != FIX:  # which ends with the same suggestion
            fix = (f"{fix}; or " if fix else "") + "download it on another machine"
        return ConfigError(
            "the dataset `{repo}` cannot be downloaded from the Hugging Face hub: {reason}",
            code="dataset-download-failed",
            allowed="a local file or folder (JSON, JSON lines, CSV, Parquet, text), a hub id that"
            " this machine can reach, or builtin:python-docs",
            fix="{advice}: `dataset=/path/to/data`",
            repo=self.repo,
            reason=reason,
            advice=fix,
        )

    def fingerprint(self) -> list[Any]:
        """Return what distinguishes this split from any other, without reading it."""
        return [self.repo, self.name, self.split, self.revision]

    def rows(self) -> Iterator[Row]:
        """Yield the rows in order. The data is downloaded on first use.

        Raises:
            ConfigError: there is no such configuration or split (lists the existing ones), or the
                download failed.
        """
        if self._loaded is None:
            self._loaded = self._load()
        columns = struct_columns(self._loaded.features.arrow_schema)
        for batch in self._loaded.iter(batch_size=1000):
            names = list(batch)
            for values in zip(*batch.values(), strict=True):
                yield without_added_nulls(dict(zip(names, values, strict=True)), columns)

    def files(self) -> list[str]:
        """Return the URLs of the split's files, ``hf://datasets/…``. Downloads none of them.

        Raises:
            ConfigError: there is no such configuration or split.
        """
        import datasets

        try:
            builder = datasets.load_dataset_builder(self.repo, self.name, revision=self.revision)
            data_files = builder.config.data_files or {}
            if self.split not in data_files:
                raise ValueError(f"unknown split `{self.split}`; it has {', '.join(data_files)}")
        except Exception as error:  # the library and its network clients raise many types
            raise self._load_error(error) from error
        return [str(file) for file in data_files[self.split]]

    def _load(self) -> Any:
        import datasets

        datasets.disable_progress_bars()
        if self.offline:
            datasets.config.HF_HUB_OFFLINE = True
        try:
            return datasets.load_dataset(
                self.repo, self.name, split=self.split, revision=self.revision
            )
        except Exception as error:  # the library and its network clients raise many types
            raise self._load_error(error) from error

    def _load_error(self, error: Exception) -> ConfigError:
        text = str(error).strip() or type(error).__name__
        return self._error(
            text.replace("\n", " ")[:300].rstrip("."),
            "set the configuration or split: "
            f"`dataset: {{path: {self.repo}, name: ..., split: ...}}`",
        )


@dataclass(frozen=True)
class DatasetAlias:
    """A dataset on the hub. ``name`` is its configuration, ``split`` the default split."""

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
    """Return the dataset of a well-known name. Case, dashes, underscores and spaces are ignored."""
    return _BY_PLAIN_NAME.get(_plain(name))


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]", "", name.lower())


_BY_PLAIN_NAME = {_plain(name): dataset for name, dataset in HUB_NAMES.items()}


def download_from_modelscope(name: str, kind: str) -> str:
    """Return the local folder of a model or dataset, downloaded if it is not in ModelScope's cache.

    Args:
        name: ``modelscope:OWNER/NAME``.
        kind: ``model`` or ``dataset``.

    Raises:
        ConfigError: the name is malformed, the optional package `modelscope` is not installed, or
            the download failed.
    """
    repo = name.removeprefix(MODELSCOPE_PREFIX).strip()
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise ConfigError(
            "`{name}` is not the name of a ModelScope {kind}",
            code="invalid-modelscope-name",
            allowed="`{modelscope_prefix}OWNER/NAME`, e.g."
            " `{modelscope_prefix}Qwen/Qwen2.5-0.5B-Instruct`",
            name=name,
            kind=kind,
            modelscope_prefix=MODELSCOPE_PREFIX,
        )
    try:
        module = importlib.import_module("modelscope.hub.snapshot_download")
    except ImportError as error:
        raise ConfigError(
            "`{name}` requires the package `modelscope`, which is not installed",
            code="missing-modelscope",
            fix='install it with `pip install "paceline[modelscope]"`, or use a Hugging Face id'
            " or a local folder",
            name=name,
        ) from error
    load = getattr(
        module, "snapshot_download" if kind == "model" else "dataset_snapshot_download", None
    )
    if load is None:
        raise ConfigError(
            "the installed version of `modelscope` cannot download a {kind}",
            code="old-modelscope",
            fix="`pip install -U modelscope`",
            kind=kind,
        )
    try:
        return str(load(repo))
    except Exception as error:  # depends on its network client
        try:
            return str(load(repo, local_files_only=True))
        except Exception:
            raise ConfigError(
                "`{name}` cannot be downloaded from ModelScope: {reason}",
                code="modelscope-download-failed",
                fix="check the name and the network, or download it on another machine and use its"
                " folder",
                name=name,
                reason=first_line(error),
            ) from error
