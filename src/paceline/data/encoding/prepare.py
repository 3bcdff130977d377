"""Prepare the config's sources as tokens on disk: read, convert, render, tokenize, cache, split."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from paceline.config.schema import Config
from paceline.config.schema.tasks import PREFERENCE_TASKS, ROLLOUT_TASKS
from paceline.core.errors import ConfigError
from paceline.core.files import cache_dir
from paceline.core.formatting import counted
from paceline.core.log import Notice
from paceline.core.report import SourceFigures
from paceline.core.texts import UserText
from paceline.data.cache import build_once, fingerprint, key_of
from paceline.data.counts import DataCounts
from paceline.data.kinds.registry import kind_key
from paceline.data.order.build import SourceSize, first_shares, source_sizes
from paceline.data.sources.names import names_of, with_names
from paceline.data.sources.resolve import open_source
from paceline.data.text.chats.environment_tools import tools_of
from paceline.data.text.new_tokens import ResolveModel, config_tokenizer
from paceline.data.text.templates import template_key
from paceline.data.text.token_columns import Column
from paceline.data.text.token_dataset import LABEL_COUNTS, LENGTHS, TokenDataset, Transform
from paceline.data.text.tokenizer import tokenizer_fingerprint

if TYPE_CHECKING:
    from paceline.data.encoding.build import EntryMeta, SourceMeta

_META = "meta.json"


@dataclass
class PreparedTokens:
    """The location and size of the tokenized data. Small and picklable.

    Args:
        train_folder, train_indices: arguments of
            :class:`paceline.data.text.token_dataset.TokenDataset`.
        eval_folder, eval_indices: the same for the validation data; the folder is None without it.
        counts: accounting of the rows of ``dataset``, including those held out for validation.
        sources: the samples of each source of ``dataset``, including those held out; empty if the
            entry of the cache does not contain them.
        eval_counts: accounting of the rows of ``val_dataset``, or None.
        train_tokens, label_tokens: number of tokens of the training samples, and of those that
            carry loss.
        num_train, num_eval: number of samples.
        notices: messages to log.
        source_sizes: the sizes of the sources of the training samples, for the order.
        source_figures: the training samples of each source, if there are several.
        tokenizer_path: local folder of the tokenizer.
    """

    train_folder: Path
    train_indices: np.ndarray | None
    eval_folder: Path | None
    eval_indices: np.ndarray | None
    counts: DataCounts
    eval_counts: DataCounts | None
    train_tokens: int
    label_tokens: int
    num_train: int
    num_eval: int
    sources: list["SourceMeta"] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    source_sizes: tuple[SourceSize, ...] = ()
    source_figures: tuple[SourceFigures, ...] = ()
    tokenizer_path: str = ""
    pad_token_id: int = 0

    def open(
        self, columns: Sequence[Column], transform: Transform | None = None
    ) -> tuple[TokenDataset, TokenDataset | None]:
        """Return the training and the validation samples, as
        :class:`~paceline.data.text.token_dataset.TokenDataset` describes it."""
        train = TokenDataset(self.train_folder, self.train_indices, columns, transform)
        if self.eval_folder is None:
            return train, None
        return train, TokenDataset(self.eval_folder, self.eval_indices, columns, transform)


def text_kind(config: Config) -> str:
    """Return the name of the kind of samples of a config with a causal language model."""
    if config.task == "pretrain":
        return "pretrain"
    if config.task in PREFERENCE_TASKS:
        return "answers" if config.task == "kto" else "pairs"
    if config.task in ROLLOUT_TASKS:
        return "prompts"
    return "sft"


def prepare_tokens(
    config: Config, kind: str, resolve_model: ResolveModel, workers: int | None = None
) -> PreparedTokens:
    """Tokenize the config's data, or find it in the token cache. Several processes may call it at
    the same time.

    Args:
        kind: name of the kind of samples, as for :func:`~paceline.data.kinds.registry.load_kind`.
        resolve_model: converts the name of a model in the config to a local folder or a hub id.
        workers: number of processes that tokenize; None to choose it by the amount of text.

    Raises:
        ConfigError: the data, the tokenizer or the chat template is invalid.
    """
    tokenizer = config_tokenizer(config, resolve_model)
    train = TokenEntry(config, kind, tokenizer, validation=False)
    train.build(workers)
    notices, eval_counts = [*train.notices], None
    eval_folder, eval_indices, num_eval = None, None, 0
    if config.val_dataset is not None:
        evaluation = TokenEntry(config, kind, tokenizer, validation=True)
        evaluation.build(workers)
        notices += evaluation.notices
        eval_folder, num_eval = evaluation.folder, evaluation.samples
        eval_counts = evaluation.counts
    lengths, labels = train.arrays()
    train_indices = None
    if config.split_dataset_ratio > 0:
        train_indices, held_out = split_indices(
            len(lengths), config.split_dataset_ratio, config.train_args.seed
        )
        lengths, labels = lengths[train_indices], labels[train_indices]
        notices.append(split_notice(len(held_out), train.samples, config.split_dataset_ratio))
        if len(held_out):
            eval_folder, eval_indices, num_eval = train.folder, held_out, len(held_out)
    return PreparedTokens(
        train_folder=train.folder,
        train_indices=train_indices,
        eval_folder=eval_folder,
        eval_indices=eval_indices,
        counts=train.counts,
        eval_counts=eval_counts,
        train_tokens=int(lengths.sum()),
        label_tokens=int(labels.sum()),
        num_train=len(lengths),
        num_eval=num_eval,
        sources=train.meta.get("sources", []),
        notices=list(dict.fromkeys(notices)),
        source_sizes=(sizes := train.sizes_of(train_indices, lengths, labels)),
        source_figures=train.figures_of(sizes, train_indices, lengths),
        tokenizer_path=str(tokenizer),
        pad_token_id=train.meta["pad_token_id"],
    )


def cached_lengths(
    config: Config, kind: str, resolve_model: ResolveModel
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return (tokens, label tokens) of each sample of ``dataset``, int64 [num_samples], or None if
    it is not in the token cache. Reads no rows and downloads nothing."""
    names = [
        config.tokenizer or config.model,
        *(source.path.partition("#")[0] for source in config.sources()),
    ]
    if not all(name.startswith("builtin:") or Path(name).expanduser().exists() for name in names):
        return None
    try:
        tokenizer = config_tokenizer(config, resolve_model)
        entry = TokenEntry(config, kind, tokenizer, validation=False)
        return entry.arrays() if (entry.folder / _META).is_file() else None
    except (ConfigError, OSError, ValueError):
        return None


def split_indices(num_samples: int, ratio: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split samples into (training, validation) indices, each sorted. Depends only on ``seed``.

    Holds out the share ``ratio``, or ``ratio`` samples if it is at least 1, but at least one
    sample. At least one sample remains for training, so nothing is held out of a single sample.
    :func:`split_notice` reports the result.

    Raises:
        ConfigError: the number of samples leaves none for training.
    """
    if ratio >= max(1, num_samples):
        raise ConfigError(
            "`split_dataset_ratio: {ratio}` holds out {held_out} samples, and the data has"
            " {num_samples}",
            code="split-too-large",
            allowed="a share below 1, or a number of samples from 1 to {most}",
            fix="use a share such as `split_dataset_ratio: 0.1`",
            ratio=f"{ratio:g}",
            held_out=f"{ratio:,g}",
            num_samples=f"{num_samples:,}",
            most=f"{max(1, num_samples - 1):,}",
        )
    held_out = min(max(1, round(num_samples * ratio if ratio < 1 else ratio)), num_samples - 1)
    order = np.random.default_rng([seed, 0x5B117]).permutation(num_samples)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def split_notice(held_out: int, total: int, ratio: float, noun: str = "sample") -> Notice:
    """Return the message about a split. It is a warning if the share of held-out samples differs
    from ``split_dataset_ratio``."""
    if held_out == 0:
        return Notice(
            "warning",
            UserText(
                "no validation: `split_dataset_ratio: {ratio}` of {total} leaves none to hold out",
                code="no-validation-rows-left",
                ratio=f"{ratio:g}",
                total=counted(total, noun),
            ),
        )
    is_larger = ratio < 1 and held_out > total * ratio
    is_minimum = is_larger and held_out > total * ratio + 0.5
    more = ""
    if is_minimum:
        more = f". That is {held_out / total:.0%}: a validation split has at least one {noun}"
    elif is_larger:
        more = f", {held_out / total:.1%}: rounded up to a full {noun}"
    text = UserText(
        "validation: {held_out} of {total} held out (split_dataset_ratio: {ratio}){more}",
        code="validation-rows-held-out",
        held_out=f"{held_out:,}",
        total=counted(total, noun),
        count=f"{total:,}",
        ratio=f"{ratio:g}",
        more=more,
        share=f"{held_out / total:.1%}" if is_larger else "",
    )
    return Notice("warning" if is_minimum else "info", text)


def _image_settings(config: Config, folder: Path) -> list[object]:
    """Return what determines the tokens of images."""
    from paceline.data.vision_language.images import load_processor

    files = sorted(folder.glob("*processor_config.json"))
    vision = config.vision
    return [
        [[file.name, *fingerprint(file)] for file in files],
        load_processor(folder, vision.max_pixels, config.trust_remote_code).backend,
        [vision.max_pixels, vision.max_images, vision.images_folder],
        # Relative paths of images depend on the folder of the data.
        [
            str(Path(source.path).expanduser().absolute())
            for source in (*config.sources(), *config.sources(validation=True))
        ],
    ]


class TokenEntry:
    """The cache entry of the training or the validation sources. :meth:`build` sets ``meta``."""

    meta: "EntryMeta"

    def __init__(self, config: Config, kind: str, tokenizer: Path, validation: bool) -> None:
        self.config, self.kind = config, kind
        self.tokenizer, self.validation = tokenizer, validation
        self.sources = [
            open_source(spec, validation=validation)
            for spec in config.sources(validation=validation)
        ]
        args = config.train_args
        has_shuffle = any(source.take is not None for source in self.sources)
        key = key_of(
            {
                "sources": [
                    [
                        source.fingerprint(),
                        source.spec.format,
                        source.spec.columns,
                        source.spec.ignore_columns,
                        source.spec.roles,
                    ]
                    for source in self.sources
                ],
                "seed": args.seed if has_shuffle else None,
                "tokenizer": tokenizer_fingerprint(tokenizer),
                "template": template_key(config, tokenizer),
                "settings": [
                    *kind_key(kind),
                    config.system,
                    args.max_sample_length,
                    args.truncation_strategy,
                    args.train_on_inputs,
                    args.train_on_turns,
                    # Negative numbers are labels only if they are listed.
                    *(label for label in config.classify.labels if label.startswith("-")),
                    # Entries of earlier versions do not have the sizes of the sources.
                    *(["sources"] if config.mixing != "concat" or len(self.sources) > 1 else []),
                ],
                **({"images": _image_settings(config, tokenizer)} if kind == "vision" else {}),
                **({"completion": config.grpo.max_completion_length} if kind == "prompts" else {}),
                **({"tools": tools} if kind == "prompts" and (tools := tools_of(config)) else {}),
            }
        )
        self.folder = cache_dir() / "tokens" / key
        self.notices: list[Notice] = []

    def build(self, workers: int | None) -> None:
        started = time.perf_counter()
        source_notices = [notice for source in self.sources for notice in source.notices]
        is_new = build_once(self.folder, _META, partial(self._fill, workers=workers))
        self.meta = json.loads((self.folder / _META).read_text(encoding="utf-8"))
        self._name_sources()
        label = "validation data" if self.validation else "data"
        size = f"{counted(self.samples, 'sample')}, {self.meta['tokens']:,} tokens"
        origin = "read from the token cache"
        if is_new:
            origin = f"tokenized in {time.perf_counter() - started:.1f} s"
        self.notices = [
            *source_notices,
            *self.meta["notices"],
            Notice(
                "info",
                UserText(
                    "{label}: {size}; {origin}",
                    code="dataset-size",
                    label=label,
                    size=size,
                    origin=origin,
                ),
            ),
        ]

    def _name_sources(self) -> None:
        """Use the current names of the sources, which may be copies of the files of the entry."""
        current = names_of(self.sources)
        notices = [Notice.from_json(record) for record in self.meta["notices"]]
        self.meta["notices"] = with_names(notices, self.meta.get("names", current), current)
        for figures, source in zip(self.meta.get("sources", []), self.sources, strict=False):
            figures["dataset"] = source.label

    def _fill(self, staging: Path, workers: int | None) -> None:
        # A start from the cache does not need these imports.
        from paceline.data.encoding.build import build_entry

        num_notices = [len(source.notices) for source in self.sources]
        meta = build_entry(staging, self.sources, self.config, self.kind, self.tokenizer, workers)
        late: list[Notice] = []
        for source, number in zip(self.sources, num_notices, strict=True):
            late += source.notices[number:]
        records = [notice.as_json() for notice in (*late, *meta["notices"])]
        meta["names"] = names_of(self.sources)
        (staging / _META).write_text(
            json.dumps({**meta, "notices": records}, indent=2, ensure_ascii=False) + "\n",
            encoding="utf-8",
        )

    @property
    def samples(self) -> int:
        return int(self.meta["samples"])

    @property
    def counts(self) -> DataCounts:
        figures = self.meta["counts"]
        return DataCounts(
            figures["read"],
            figures["kept"],
            figures["truncated"] or 0,
            figures["dropped"],
            figures.get("excluded_turns", 0),
        )

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens, label tokens) of each sample, int64 [num_samples]."""
        return np.load(self.folder / LENGTHS), np.load(self.folder / LABEL_COUNTS)

    def sizes_of(
        self, indices: np.ndarray | None, lengths: np.ndarray, labels: np.ndarray
    ) -> tuple[SourceSize, ...]:
        """Return the sizes of the sources.

        Args:
            indices: the samples that are used, sorted; None for all.
            lengths, labels: their numbers of tokens and label tokens.

        Raises:
            ConfigError: a source of a mixture has no sample among them.
        """
        ends = np.array([len(lengths)])
        if self.config.mixing != "concat":
            ends = self._ends(indices)
        names = [source.label for source in self.sources]
        sizes = source_sizes(self.config, names, lengths, labels, ends)
        for size in sizes:
            if not size.num_samples:
                raise ConfigError(
                    "`split_dataset_ratio`: no sample of `{size}` is left for training",
                    code="split-leaves-no-samples",
                    fix="add rows to it, or set `val_dataset` instead of `split_dataset_ratio`",
                    size=size.name,
                )
        return sizes

    def figures_of(
        self, sizes: Sequence[SourceSize], indices: np.ndarray | None, lengths: np.ndarray
    ) -> tuple[SourceFigures, ...]:
        """Return the training samples of each source and its share of the rows; empty if there is
        only one source.

        Args:
            sizes: the result of :meth:`sizes_of`; the other arguments are its arguments.
        """
        if len(self.sources) == 1 and self.config.mixing == "concat":
            return ()
        ends = self._ends(indices).tolist()
        starts = [0, *ends[:-1]]
        tokens = [int(lengths[start:end].sum()) for start, end in zip(starts, ends, strict=True)]
        shares = [(end - start) / len(lengths) for start, end in zip(starts, ends, strict=True)]
        if self.config.mixing != "concat":
            shares = first_shares(self.config, sizes)
        elif self.config.train_args.packs_rows:
            shares = [number / sum(tokens) for number in tokens]
        return tuple(
            {
                "name": source.label,
                "samples": ends[number] - starts[number],
                "tokens": tokens[number],
                "share": shares[number],
            }
            for number, source in enumerate(self.sources)
        )

    def _ends(self, indices: np.ndarray | None) -> np.ndarray:
        """Return the index of the first sample after each source, int64 [sources]."""
        ends = np.cumsum([source["samples"] for source in self.meta["sources"]])
        return ends if indices is None else np.searchsorted(indices, ends)
