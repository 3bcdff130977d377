"""What a dataset holds, in tokens: lengths, exact duplicates, how much of the vocabulary is used,
what a `max_length` cuts.

Everything is read from the token cache, through the same preparation as training. Where the
config's own `max_length` has cut something, the dataset is tokenised a second time without a limit,
into an entry of its own: what was cut is in no other place.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.events import DataFigures
from paceline.core.log import Notice
from paceline.data.sources.readers import is_text
from paceline.data.sources.resolve import open_source
from paceline.data.text.chunks import NO_ANSWER, TOO_LONG
from paceline.data.text.prepare import PreparedTokens, ResolveModel, TextTask, prepare_tokens
from paceline.data.text.token_dataset import TokenDataset
from paceline.data.text.tokenizer import load_tokenizer

LIMITS = (128, 256, 512, 1024, 2048, 4096, 8192)
#: no sample is as long; fits a signed 32-bit integer
NO_LIMIT = 2**31 - 1
_MOST_BINS = 40
_REPEATS_SHOWN = 5
_TEXT_TOKENS = 24
_PERCENTILES = (1, 10, 50, 90, 95, 99)


#: Samples with ``from`` ≤ tokens < ``to``.
Bin = TypedDict("Bin", {"from": int, "to": int, "samples": int})


class Repeat(TypedDict):
    """A sample with the same tokens as ``times - 1`` later ones; ``text``: how it begins."""

    sample: int
    times: int
    text: str


class Duplicates(TypedDict):
    """Samples with the same tokens as an earlier one. ``repeated``: samples that come again."""

    samples: int
    share: float
    distinct: int
    repeated: int
    most_repeated: list[Repeat]


class LimitStats(TypedDict):
    """What training with ``max_length`` would lose."""

    max_length: int
    samples_cut: int
    share_cut: float
    samples_left_out: int
    tokens_lost: int
    share_lost: float


class VocabularyUse(TypedDict):
    """Tokens of the vocabulary, those of them in the data, and their share."""

    size: int
    used: int
    coverage: float


class DatasetStats(TypedDict):
    """The figures of a dataset. ``lengths``: min, mean, max and percentiles (``p50``) in tokens."""

    dataset: str
    samples: int
    tokens: int
    label_tokens: int
    held_out: int
    rows: DataFigures
    lengths: dict[str, float]
    histogram: list[Bin]
    duplicates: Duplicates
    vocabulary: VocabularyUse
    max_length: int
    overlong: str
    limits: list[LimitStats]


@dataclass(frozen=True)
class Samples:
    """One row a sample, uncut.

    Args:
        lengths: int64 [num_samples], tokens.
        first_label: int64 [num_samples], place of the first token that carries loss (its length
            where none does).
        digests: uint64 [num_samples, 2], a hash of the token ids (BLAKE2b, 128 bits).
        vocabulary: int64 [ids], how often each token id stands in the data.
    """

    lengths: np.ndarray
    first_label: np.ndarray
    digests: np.ndarray
    vocabulary: np.ndarray


def dataset_stats(
    config: Config, resolve_model: ResolveModel
) -> tuple[DatasetStats, PreparedTokens]:
    """The figures of the config's `dataset` (what is held out for validation included), and its
    preparation for training. ``resolve_model``: see :func:`prepare_tokens`.

    Raises:
        ConfigError: a task whose samples have no tokens; whatever can be wrong with the data.
    """
    if config.task not in ("sft", "pretrain"):
        raise ConfigError(
            f"the samples of `task: {config.task}` have no tokens",
            allowed="sft, pretrain",
            fix="give a config of such a task",
        )
    task: TextTask = "pretrain" if config.task == "pretrain" else "sft"
    prepared = prepare_tokens(config, task, resolve_model)
    whole = prepared
    if _was_cut(prepared, config):
        args = config.train_args.model_copy(
            update={"max_length": NO_LIMIT, "truncation_strategy": "truncate"}
        )
        whole = prepare_tokens(
            config.model_copy(update={"train_args": args, "val_dataset": None}), task, resolve_model
        )
    dataset = TokenDataset(whole.train_folder)
    samples = read_samples(dataset)
    tokenizer = load_tokenizer(Path(prepared.tokenizer_path), config.trust_remote_code)
    documents = task == "pretrain" or all(_are_documents(config))
    if not documents and any(_are_documents(config)):
        text = (
            "text files stand beside other data: what is lost of them is told as if they were"
            " truncated, not cut into samples"
        )
        prepared.notices.append(Notice("warning", text))
    limit, overlong = config.train_args.max_length, config.train_args.truncation_strategy
    used = int(np.count_nonzero(samples.vocabulary))
    repeats = duplicates(samples)
    for repeat in repeats["most_repeated"]:
        ids = dataset[repeat["sample"]]["input_ids"][:_TEXT_TOKENS]
        repeat["text"] = tokenizer.decode(ids.tolist())
    figures: DatasetStats = {
        "dataset": ", ".join(source.path for source in config.sources()),
        "samples": len(samples.lengths),
        "tokens": int(samples.lengths.sum()),
        "label_tokens": int(dataset.label_counts.sum()),
        "held_out": 0 if prepared.eval_indices is None else len(prepared.eval_indices),
        "rows": prepared.counts.as_dict(),
        "lengths": {
            "min": int(samples.lengths.min()),
            "mean": float(samples.lengths.mean()),
            **{
                f"p{percent}": int(np.percentile(samples.lengths, percent, method="inverted_cdf"))
                for percent in _PERCENTILES
            },
            "max": int(samples.lengths.max()),
        },
        "histogram": histogram(samples.lengths),
        "duplicates": repeats,
        "vocabulary": {
            "size": tokenizer.vocab_size,
            "used": used,
            "coverage": used / tokenizer.vocab_size,
        },
        "max_length": limit,
        "overlong": "cut into samples" if documents else overlong,
        "limits": [
            cut_by(max_length, samples, overlong, documents)
            for max_length in sorted({limit, *LIMITS})
        ],
    }
    return figures, prepared


def _was_cut(prepared: PreparedTokens, config: Config) -> bool:
    """Whether the entry for training lacks something of what was given. A cut document leaves a
    sample of full length."""
    limit = config.train_args.max_length
    longest = int(TokenDataset(prepared.train_folder).lengths.max(initial=0))
    return (
        prepared.counts.truncated > 0
        or longest >= limit
        or any(reason in prepared.counts.dropped for reason in (TOO_LONG, NO_ANSWER))
    )


def _are_documents(config: Config) -> list[bool]:
    """Of each file: plain text is a document under `sft` too, cut into samples, never truncated. A
    hub dataset has rows."""
    sources = [open_source(source) for source in config.sources()]
    return [
        kind for source in sources for kind in [is_text(file) for file in source.files] or [False]
    ]


def read_samples(dataset: TokenDataset) -> Samples:
    """One pass over a dataset's tokens, a sample in memory at a time."""
    count = len(dataset)
    digests = np.zeros((count, 2), dtype=np.uint64)
    first = np.array(dataset.lengths)
    vocabulary = np.zeros(1, dtype=np.int64)
    for index in range(count):
        sample = dataset[index]
        ids, mask = sample["input_ids"], sample["labels_mask"]
        digests[index] = np.frombuffer(
            hashlib.blake2b(ids.tobytes(), digest_size=16).digest(), dtype=np.uint64
        )
        labelled = np.flatnonzero(mask[1:])
        if len(labelled):
            first[index] = labelled[0] + 1
        if (top := int(ids.max(initial=0))) >= len(vocabulary):
            vocabulary = np.concatenate(
                [vocabulary, np.zeros(top + 1 - len(vocabulary), dtype=np.int64)]
            )
        if len(ids) > len(vocabulary):
            vocabulary += np.bincount(ids, minlength=len(vocabulary))
        else:
            np.add.at(vocabulary, ids, 1)
    return Samples(np.array(dataset.lengths), first, digests, vocabulary)


def duplicates(samples: Samples) -> Duplicates:
    """Count the samples with the same tokens as an earlier one."""
    _, first, times = np.unique(samples.digests, axis=0, return_index=True, return_counts=True)
    order = np.lexsort((first, -times))[:_REPEATS_SHOWN]
    return {
        "samples": int(len(samples.lengths) - len(first)),
        "share": float(1 - len(first) / len(samples.lengths)),
        "distinct": len(first),
        "repeated": int(np.count_nonzero(times > 1)),
        "most_repeated": [
            Repeat(sample=int(first[place]), times=int(times[place]), text="")
            for place in order
            if times[place] > 1
        ],
    }


def cut_by(limit: int, samples: Samples, overlong: str, documents: bool) -> LimitStats:
    """What training with ``max_length=limit`` would lose, as :mod:`paceline.data.text.build` cuts:
    documents are cut into samples and lose only a last token that stands alone; other samples are
    truncated, or left out whole where nothing that carries loss remains, or where
    ``truncation_strategy`` is `drop`."""
    lengths = samples.lengths
    over = lengths > limit
    if documents:
        left_out = np.zeros(len(lengths), dtype=bool)
        lost = np.where(over & (lengths % limit == 1), 1, 0)
    else:
        left_out = over if overlong == "drop" else over & (samples.first_label >= limit)
        lost = np.where(left_out, lengths, np.maximum(lengths - limit, 0))
    return {
        "max_length": limit,
        "samples_cut": int(over.sum()),
        "share_cut": float(over.mean()),
        "samples_left_out": int(left_out.sum()),
        "tokens_lost": int(lost.sum()),
        "share_lost": float(lost.sum() / lengths.sum()),
    }


def histogram(lengths: np.ndarray) -> list[Bin]:
    """At most 41 bins of equal width (1, 2 or 5 times a power of ten) up to the longest but one
    percent of the samples, and one for the rest: ``from`` ≤ tokens < ``to``."""
    reach = int(np.percentile(lengths, 99, method="inverted_cdf"))
    width = next(
        unit * 10**power
        for power in range(12)
        for unit in (1, 2, 5)
        if unit * 10**power * _MOST_BINS > reach
    )
    edges = list(range(int(lengths.min()) // width * width, reach + width + 1, width))
    longest = int(lengths.max())
    if longest >= edges[-1]:
        edges.append(longest + 1)
    counts, _ = np.histogram(lengths, bins=np.array([*edges[:-1], edges[-1] - 0.5]))
    return [
        {"from": a, "to": b, "samples": int(n)}
        for a, b, n in zip(edges, edges[1:], counts, strict=False)
    ]
