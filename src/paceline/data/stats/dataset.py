"""Compute the statistics of a dataset: lengths, duplicates, languages, vocabulary, and the
effect of `max_length`.

Everything is read from the token cache, with the same preparation as for training. If samples were
cut at the `max_length` of the config, the dataset is tokenized again without a limit, into a
separate entry, because the removed tokens are not stored.
"""

import hashlib
from array import array
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from paceline.config.packages import check_package
from paceline.config.schema import Config
from paceline.config.schema.tasks import CAUSAL_TASKS, ROLLOUT_TASKS
from paceline.core.errors import ConfigError
from paceline.core.log import Notice
from paceline.core.report import DataFigures
from paceline.core.stop import poll
from paceline.core.texts import UserText
from paceline.data.encoding.prepare import PreparedTokens, prepare_tokens, text_kind
from paceline.data.kinds.base import NO_ANSWER, TOO_LONG
from paceline.data.kinds.label import read_labels
from paceline.data.kinds.registry import load_kind
from paceline.data.sources.readers import is_text
from paceline.data.sources.resolve import open_source
from paceline.data.text.new_tokens import ResolveModel
from paceline.data.text.token_dataset import TokenDataset
from paceline.data.text.tokenizer import LoadedTokenizer, load_tokenizer

if TYPE_CHECKING:
    from paceline.data.encoding.build import SourceMeta
    from paceline.data.stats.near_duplicates import NearDuplicates

LIMITS = (128, 256, 512, 1024, 2048, 4096, 8192)
#: A limit that no sample reaches and that fits in a signed 32-bit integer.
NO_LIMIT = 2**31 - 1
_MAX_BINS = 40
_REPEATS_SHOWN = 5
_TEXT_TOKENS = 24
#: Number of tokens of a sample whose language is identified.
_LANGUAGE_TOKENS = 512
_PERCENTILES = (1, 10, 50, 90, 95, 99)


#: Samples with ``from`` ≤ tokens < ``to``.
Bin = TypedDict("Bin", {"from": int, "to": int, "samples": int})


class Repeat(TypedDict):
    """A sample with the same tokens as ``times - 1`` later ones. ``text``: its first tokens."""

    sample: int
    times: int
    text: str


class Duplicates(TypedDict):
    """Samples with the same tokens as an earlier one. ``repeated``: number of samples that
    occur again."""

    samples: int
    share: float
    distinct: int
    repeated: int
    most_repeated: list[Repeat]


class LimitStats(TypedDict):
    """The loss of data in training with ``max_length``."""

    max_length: int
    samples_cut: int
    share_cut: float
    samples_left_out: int
    tokens_lost: int
    share_lost: float


class VocabularyUse(TypedDict):
    """Number of tokens in the vocabulary, number of those in the data, and their ratio."""

    size: int
    used: int
    coverage: float


class ClassCount(TypedDict):
    """The number of samples of a class, and its share of all samples."""

    label: str
    samples: int
    share: float


class LanguageShare(TypedDict):
    """The number of samples in a language (ISO 639-1), their share of all, and their tokens."""

    language: str
    samples: int
    share: float
    tokens: int


class DatasetStats(TypedDict):
    """Statistics of a dataset. ``sequences``: number of sequences of tokens, two for a pair of
    answers; ``lengths``: their min, mean, max and percentiles (``p50``) in tokens.
    ``classes``: counts by class of labeled texts, and of answers that are marked as desirable or
    not, else None. ``near_duplicates`` and ``languages``: None unless requested."""

    task: str
    dataset: str
    samples: int
    sequences: int
    classes: list[ClassCount] | None
    tokens: int
    label_tokens: int
    held_out: int
    rows: DataFigures
    sources: "list[SourceMeta]"
    lengths: dict[str, float]
    histogram: list[Bin]
    duplicates: Duplicates
    near_duplicates: "NearDuplicates | None"
    languages: list[LanguageShare] | None
    vocabulary: VocabularyUse
    max_length: int
    overlong: str
    limits: list[LimitStats]


@dataclass(frozen=True)
class Samples:
    """Uncut samples, each of one sequence of tokens, or of two if it is a pair of answers.

    Args:
        lengths: int64 [num_sequences], in tokens.
        first_label: int64 [num_sequences], index of the first token that carries loss, or the
            length.
        starts: int64 [num_samples], index of the first sequence of each sample.
        digests: uint64 [num_samples, 2], a hash of the token ids (BLAKE2b, 128 bits).
        vocabulary: int64 [ids], number of occurrences of each token id.
    """

    lengths: np.ndarray
    first_label: np.ndarray
    starts: np.ndarray
    digests: np.ndarray
    vocabulary: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)


def dataset_stats(
    config: Config,
    resolve_model: ResolveModel,
    *,
    near_duplicates: bool = False,
    languages: bool = False,
    has_images: bool = False,
) -> tuple[DatasetStats, PreparedTokens]:
    """Return the statistics of the config's `dataset`, including the samples held out for
    validation, and its preparation for training. ``resolve_model``: see :func:`prepare_tokens`.

    Args:
        near_duplicates: whether to search for similar samples, which needs datasketch.
        languages: whether to identify the languages, which needs py3langid.
        has_images: whether the config trains a vision-language model.

    Raises:
        ConfigError: the samples of the task have no tokens, the data is invalid, or a package is
            not installed.
    """
    if near_duplicates:
        check_package("datasketch", "`--near-duplicates`", "leave the option out", "data")
    if languages:
        check_package("py3langid", "`--languages`", "leave the option out", "data")
    kind = _kind_of(config, has_images)
    prepared = prepare_tokens(config, kind, resolve_model)
    uncut = prepared
    if _was_cut(prepared, config):
        args = config.train_args.model_copy(
            update={"max_length": NO_LIMIT, "truncation_strategy": "truncate"}
        )
        uncut = prepare_tokens(
            config.model_copy(update={"train_args": args, "val_dataset": None}), kind, resolve_model
        )
    dataset = TokenDataset(uncut.train_folder, None, load_kind(kind).columns)
    samples = read_samples(dataset)
    tokenizer = load_tokenizer(Path(prepared.tokenizer_path), config.trust_remote_code)
    is_text = kind in ("sft", "pretrain", "vision")
    documents = is_text and (kind == "pretrain" or all(_are_documents(config)))
    if is_text and not documents and any(_are_documents(config)):
        text = UserText(
            "text files are mixed with other data: the lost tokens are computed as if they"
            " were truncated, although they are cut into samples",
            code="statistics-of-mixed-data",
        )
        prepared.notices.append(Notice("warning", text))
    if has_images:
        text = UserText(
            "duplicates are compared by their text, not by their images", code="duplicates-by-text"
        )
        prepared.notices.append(Notice("info", text))
    limit, overlong = config.train_args.max_length, config.train_args.truncation_strategy
    if config.task in ROLLOUT_TASKS:  # a prompt is never truncated
        limit, overlong = limit - config.grpo.max_completion_length, "drop"
    used = int(np.count_nonzero(samples.vocabulary))
    repeats = duplicates(samples)
    for repeat in repeats["most_repeated"]:
        tokens = dataset[repeat["sample"]]["input_ids"][:_TEXT_TOKENS]
        repeat["text"] = tokenizer.decode(tokens.tolist())
    figures: DatasetStats = {
        "task": config.task,
        "dataset": ", ".join(source.path for source in config.sources()),
        "samples": len(samples),
        "sequences": len(samples.lengths),
        "classes": _count_classes(dataset),
        "tokens": int(samples.lengths.sum()),
        "label_tokens": int(dataset.label_counts.sum()),
        "held_out": 0 if prepared.eval_indices is None else len(prepared.eval_indices),
        "rows": prepared.counts.as_dict(),
        "sources": uncut.sources,
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
        "near_duplicates": _similar_samples(dataset, tokenizer) if near_duplicates else None,
        "languages": identify_languages(dataset, tokenizer) if languages else None,
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


def _kind_of(config: Config, has_images: bool) -> str:
    """Return the name of the kind of samples of a config.

    Raises:
        ConfigError: the task has no texts, or only the task knows the form of its samples.
    """
    if has_images:
        return "vision"
    if config.task in CAUSAL_TASKS:
        return text_kind(config)
    if config.task == "reward":
        return "reward"
    if config.task == "classify":
        return "classify"
    raise ConfigError(
        "statistics are not supported with `task: {task}`: only the task knows the form of its"
        " samples",
        code="statistics-with-task",
        allowed=", ".join((*CAUSAL_TASKS, "reward", "classify", "recommend")),
        fix="use a config with one of these tasks",
        task=config.task,
    )


def _count_classes(dataset: TokenDataset) -> list[ClassCount] | None:
    """Return the classes of labeled texts, or of answers that are marked, the most frequent
    first; None for other data."""
    counts: Counter[str] = Counter()
    if dataset.has("label"):
        names = read_labels(dataset.folder).labels
        for index in range(len(dataset)):
            counts.update(str(names[number]) for number in dataset.value("label", index).tolist())
    elif dataset.has("chosen_length"):
        chosen_lengths = dataset.numbers("chosen_length")
        if ((chosen_lengths > 0) & (chosen_lengths < dataset.lengths)).any():
            return None
        counts["desirable"] = int(np.count_nonzero(chosen_lengths))
        counts["undesirable"] = len(dataset) - counts["desirable"]
    else:
        return None
    return [
        ClassCount(label=label, samples=count, share=count / len(dataset))
        for label, count in counts.most_common()
    ]


def _content_tokens(dataset: TokenDataset, index: int, number: int) -> list[int]:
    """Return the first tokens of a sample that carry loss (the answers of chats), or of a labeled
    text."""
    sample = dataset[index]
    ids = sample["input_ids"]
    if not dataset.has("label"):
        ids = ids[sample["labels_mask"]]
    tokens: list[int] = ids[:number].tolist()
    return tokens


def _similar_samples(dataset: TokenDataset, tokenizer: LoadedTokenizer) -> "NearDuplicates":
    from paceline.data.stats.near_duplicates import near_duplicates

    result = near_duplicates(dataset)
    for group in result["largest"]:
        tokens = (_content_tokens(dataset, each, _TEXT_TOKENS) for each in group["samples"])
        group["texts"] = list(map(tokenizer.decode, tokens))
    return result


def identify_languages(dataset: TokenDataset, tokenizer: LoadedTokenizer) -> list[LanguageShare]:
    """Return the languages of the texts that carry loss (the answers of chats), or of labeled
    texts, the most frequent first. A text without letters is ``und``, undetermined."""
    import py3langid

    samples: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for index in range(len(dataset)):
        if index % 1000 == 0:
            poll()
        ids = _content_tokens(dataset, index, _LANGUAGE_TOKENS)
        text = tokenizer.decode([each for each in ids if each not in tokenizer.special_ids])
        language = "und"
        if any(letter.isalpha() for letter in text):
            language = str(py3langid.classify(text)[0])
        samples[language] += 1
        tokens[language] += int(dataset.lengths[index])
    return [
        LanguageShare(
            language=language, samples=count, share=count / len(dataset), tokens=tokens[language]
        )
        for language, count in samples.most_common()
    ]


def _was_cut(prepared: PreparedTokens, config: Config) -> bool:
    """Return whether the entry for training lacks some tokens. A document that was cut leaves a
    sample of full length."""
    limit = config.train_args.max_length
    longest = int(TokenDataset(prepared.train_folder).lengths.max(initial=0))
    return (
        prepared.counts.truncated > 0
        or longest >= limit
        or any(reason in prepared.counts.dropped for reason in (TOO_LONG, NO_ANSWER))
    )


def _are_documents(config: Config) -> list[bool]:
    """Return whether each file is a document, which is cut into samples and never truncated (also
    with `sft`). Plain text is; a hub dataset has rows."""
    sources = [open_source(source) for source in config.sources()]
    return [
        is_document
        for source in sources
        for is_document in [is_text(file) for file in source.files] or [False]
    ]


def read_samples(dataset: TokenDataset) -> Samples:
    """Read a dataset's tokens in one pass, with one sample in memory at a time."""
    digests = np.zeros((len(dataset), 2), dtype=np.uint64)
    lengths, first, starts = array("q"), array("q"), array("q")
    vocabulary = np.zeros(1, dtype=np.int64)
    for index in range(len(dataset)):
        sample = dataset[index]
        ids, mask = sample["input_ids"], sample["labels_mask"]
        digests[index] = np.frombuffer(
            hashlib.blake2b(ids.tobytes(), digest_size=16).digest(), dtype=np.uint64
        )
        starts.append(len(lengths))
        for start, end in pairwise(_bounds(dataset, index)):
            lengths.append(end - start)
            labeled = np.flatnonzero(mask[start + 1 : end])
            # A text to classify is not dropped if it is truncated.
            has_labels = len(labeled) or dataset.has("label")
            first.append(int(labeled[0]) + 1 if len(labeled) else 0 if has_labels else end - start)
        missing = int(ids.max(initial=0)) + 1 - len(vocabulary)
        if missing > 0:
            vocabulary = np.pad(vocabulary, (0, missing))
        if len(ids) > len(vocabulary):
            vocabulary += np.bincount(ids, minlength=len(vocabulary))
        else:
            np.add.at(vocabulary, ids, 1)
    return Samples(np.array(lengths), np.array(first), np.array(starts), digests, vocabulary)


def _bounds(dataset: TokenDataset, index: int) -> list[int]:
    """Return the bounds of a sample's sequences: a pair has two, one after the other."""
    length = int(dataset.lengths[index])
    if dataset.has("chosen_length"):
        return sorted({0, dataset.value("chosen_length", index), length})
    return [0, length]


def duplicates(samples: Samples) -> Duplicates:
    """Count the samples with the same tokens as an earlier one."""
    _, first, times = np.unique(samples.digests, axis=0, return_index=True, return_counts=True)
    order = np.lexsort((first, -times))[:_REPEATS_SHOWN]
    return {
        "samples": int(len(samples) - len(first)),
        "share": float(1 - len(first) / len(samples)),
        "distinct": len(first),
        "repeated": int(np.count_nonzero(times > 1)),
        "most_repeated": [
            Repeat(sample=int(first[group]), times=int(times[group]), text="")
            for group in order
            if times[group] > 1
        ],
    }


def cut_by(limit: int, samples: Samples, overlong: str, documents: bool) -> LimitStats:
    """Return the loss of data in training with ``max_length=limit``.

    As in :mod:`paceline.data.kinds`, documents are cut into samples and lose only a
    single last token. Other samples are truncated, or dropped if no token that carries loss remains
    or if ``truncation_strategy`` is `drop`. Each answer of a pair is truncated on its own, and the
    pair is dropped if one of them is.
    """
    lengths, starts = samples.lengths, samples.starts
    are_over = lengths > limit
    over = np.logical_or.reduceat(are_over, starts)
    if documents:
        dropped = np.zeros(len(lengths), dtype=bool)
        lost = np.where(over & (lengths % limit == 1), 1, 0)
    else:
        are_dropped = are_over if overlong == "drop" else are_over & (samples.first_label >= limit)
        dropped = np.logical_or.reduceat(are_dropped, starts)
        lost = np.add.reduceat(np.maximum(lengths - limit, 0), starts)
        lost = np.where(dropped, np.add.reduceat(lengths, starts), lost)
    return {
        "max_length": limit,
        "samples_cut": int(over.sum()),
        "share_cut": float(over.mean()),
        "samples_left_out": int(dropped.sum()),
        "tokens_lost": int(lost.sum()),
        "share_lost": float(lost.sum() / lengths.sum()),
    }


def histogram(lengths: np.ndarray) -> list[Bin]:
    """Return at most 41 bins of equal width (1, 2 or 5 times a power of ten) up to the 99th
    percentile, and one for the rest: ``from`` ≤ tokens < ``to``."""
    reach = int(np.percentile(lengths, 99, method="inverted_cdf"))
    width = next(
        unit * 10**power
        for power in range(12)
        for unit in (1, 2, 5)
        if unit * 10**power * _MAX_BINS > reach
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
