"""The first rows of a config's dataset as the model will see them: template applied, label tokens
marked, what is cut."""

from itertools import islice, pairwise
from typing import Any

import numpy as np

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.data.sources.resolve import ResolvedSource, open_source
from paceline.data.sources.rows import MalformedRow, Unsupported
from paceline.data.text.chunks import converter_of, encoder_of, refusal
from paceline.data.text.encode import Encoded, Encoder
from paceline.data.text.templates import asked_template
from paceline.data.text.tokenizer import LoadedTokenizer, find_tokenizer, load_tokenizer
from paceline.models.builtin import resolve_model
from paceline.tasks.preview_samples import preview_clicks, preview_images, samples_as_text

MOST_ROWS = 100
#: Of a longer row only so many tokens are shown; its counts are of the whole.
MOST_TOKENS = 4096
_WITHOUT_TOKENS = {"classify": preview_images, "recommend": preview_clicks}


def preview(config: Config, rows: int = 5) -> dict[str, Any]:
    """The first ``rows`` rows of each source of ``dataset``, in the order of the file.

    Returns:
        ``{task, max_length, overlong, rows: [Row], notices}``. A row: ``source, place, format,
        reason`` (why it is left out, or None), ``segments`` [{text, label, cut}] (label: its tokens
        carry loss; cut: they are not trained on), ``num_tokens, label_tokens, cut_tokens,
        hidden_tokens`` (not shown here), ``parts`` (samples that a document becomes). For
        `classify` and `recommend` as :func:`~paceline.tasks.preview_samples.preview_images` and
        ``preview_clicks`` say.

    Raises:
        ConfigError: a task of the user's own; whatever can be wrong with the data.
    """
    if not 1 <= rows <= MOST_ROWS:
        raise ConfigError(f"`--rows {rows}` is out of range", allowed=f"1 to {MOST_ROWS}")
    if config.task in _WITHOUT_TOKENS:
        return _WITHOUT_TOKENS[config.task](config, rows)
    if config.task not in ("sft", "pretrain"):
        raise ConfigError(
            f"what the samples of `task: {config.task}` look like is known to that task alone",
            allowed="a look at the samples of `task: sft`, `pretrain`, `classify` and `recommend`",
            fix=(
                "open the data in a program of its own kind; `paceline sft CONFIG --dry-run` checks"
                " that it can be read"
            ),
        )
    tokenizer = load_tokenizer(
        find_tokenizer(resolve_model(config.tokenizer or config.model), config.trust_remote_code),
        config.trust_remote_code,
    )
    asked = asked_template(config)
    source, notices = asked.choose(tokenizer)
    encoder = encoder_of(config, config.task, tokenizer, source, asked.for_tools(tokenizer))
    sources = [open_source(one) for one in config.sources()]
    found = [row for one in sources for row in _rows(one, rows, encoder, tokenizer, config)]
    return {
        "task": config.task,
        "max_length": config.train_args.max_length,
        "overlong": config.train_args.overlong,
        "rows": found,
        "notices": [
            list(notice)
            for notice in [*notices, *(notice for one in sources for notice in one.notices)]
        ],
    }


def _rows(
    source: ResolvedSource, rows: int, encoder: Encoder, tokenizer: LoadedTokenizer, config: Config
) -> list[dict[str, Any]]:
    converter = converter_of(source, encoder, config)
    out = []
    for place, row in islice(source.rows(config.train_args.seed), rows):
        seen = converter.seen.copy()
        try:
            encoded = encoder([converter(row)])[0]
        except MalformedRow as reason:
            encoded = str(reason)
        except Unsupported as error:
            raise refusal(error, place) from None
        shape = next(iter(converter.seen - seen), None)
        about = {"source": source.label, "place": place, "format": shape}
        if isinstance(encoded, str):
            refused = encoder.refusals.most_common(1)
            more = f": {refused[0][0]}" if "template" in encoded and refused else ""
            out.append({**about, **_empty(encoded + more)})
        else:
            out.append({**about, **_shown(encoded, tokenizer, config)})
    return out


def _empty(reason: str) -> dict[str, Any]:
    counts = dict.fromkeys(("num_tokens", "label_tokens", "cut_tokens", "hidden_tokens"), 0)
    return {"reason": reason, "segments": [], **counts, "parts": 0}


def _shown(one: Encoded, tokenizer: LoadedTokenizer, config: Config) -> dict[str, Any]:
    limit, drops = config.train_args.max_length, config.train_args.overlong == "drop"
    ids, labels = one.input_ids, one.labels_mask.copy()
    labels[:1] = False  # nothing comes before it to predict it from
    length, reason = len(ids), None
    kept = length if one.is_document or length <= limit else 0 if drops else limit
    if kept == 0 and length:
        reason = "longer than max_length"
    elif not labels[:kept].any():
        reason = "nothing to learn from" if kept == length else "no answer left after truncation"
    cut = np.arange(length) >= (kept if reason is None else 0)
    seen = min(length, MOST_TOKENS)
    edges = (
        np.flatnonzero((labels[1:seen] != labels[: seen - 1]) | (cut[1:seen] != cut[: seen - 1]))
        + 1
    )
    bounds = [0, *edges.tolist(), seen] if seen else []
    segments = [
        {
            "text": tokenizer.decode(ids[start:end].tolist()),
            "label": bool(labels[start]),
            "cut": bool(cut[start]),
        }
        for start, end in pairwise(bounds)
    ]
    return {
        "reason": reason,
        "segments": segments,
        "num_tokens": length,
        "label_tokens": int(np.count_nonzero(labels & ~cut)),
        "cut_tokens": int(np.count_nonzero(cut)),
        "hidden_tokens": length - seen,
        "parts": -(-length // limit) if one.is_document else 1,
    }


def as_text(found: dict[str, Any]) -> str:
    """For a terminal: the label tokens stand in 【】, what is cut in ⟦⟧."""
    if found["task"] in _WITHOUT_TOKENS:
        return samples_as_text(found)
    lines = []
    for number, row in enumerate(found["rows"], 1):
        counts = (
            f"{row['num_tokens']:,} tokens, {row['label_tokens']:,} with loss,"
            f" {row['cut_tokens']:,} cut"
        )
        lines += [
            f"--- {number}: {row['place']} ({row['format'] or 'no format'}):"
            f" {row['reason'] or counts}"
        ]
        parts = [
            (
                f"⟦{one['text']}⟧"
                if one["cut"]
                else f"【{one['text']}】"
                if one["label"]
                else one["text"]
            )
            for one in row["segments"]
        ]
        lines += ["".join(parts)] if parts else []
    return "\n".join([*lines, "", "【label tokens】 carry loss, ⟦what is cut⟧ is not trained on."])
