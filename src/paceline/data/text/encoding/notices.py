"""Messages about the rows of sources: their formats, unused columns, and why rows are dropped."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.core.errors import ConfigError
from paceline.core.formatting import counted
from paceline.core.log import Notice
from paceline.data.kinds.base import EQUAL_PAIRS, NO_ANSWER, TOO_LONG, RowCounts, SampleKind
from paceline.data.sources.resolve import ResolvedSource
from paceline.data.text.columns import (
    MESSAGE_KEYS,
    Tally,
    columns_fix,
    matching_formats,
    suggested_columns,
)
from paceline.data.text.refused_rows import MEDIA


def drop_reasons(counts: RowCounts) -> str:
    """Return why rows are dropped, with the number of rows and the first one for each reason."""
    return "; ".join(
        f"{reason}: {num_rows:,} (first: {counts.first[reason]})"
        for reason, num_rows in counts.dropped.most_common()
    )


def nothing_kept(
    source: ResolvedSource, kind: SampleKind, tally: Tally, counts: RowCounts
) -> ConfigError:
    """Return the error for a source without usable rows."""
    dropped = counts.dropped
    formats = "; ".join(f"{name}: {columns}" for name, columns in kind.formats.items())
    if tally.unmatched and tally.unmatched.total() == dropped.total():
        columns = next(iter(tally.unmatched))
        mapping = suggested_columns(columns) or kind.mapping
        shown = f"`{source.label}` ({', '.join(columns) or 'none'})"
        if source.spec.format == "auto":
            what, fix = f"the columns of {shown} match no format", columns_fix(mapping)
        else:
            what = f"the columns of {shown} do not match the format `{source.spec.format}`"
            matches = matching_formats({key: [{}] for key in columns})
            fix = f"set `format: {matches[0]}` or remove it; " if matches else ""
            fix += columns_fix(mapping)
        return ConfigError(what, code="unknown-columns", allowed=formats, fix=fix)
    if dropped and set(dropped) <= {TOO_LONG, NO_ANSWER}:
        what = (
            f"every sample of `{source.label}` is too long: the shortest has"
            f" {counts.shortest_overlong:,} tokens, train_args.max_length is"
            f" {kind.config.train_args.max_length:,}"
        )
        fix = f"set `train_args.max_length` to at least {counts.shortest_overlong}"
        if TOO_LONG in dropped:
            return ConfigError(
                what,
                code="samples-too-long",
                fix="{advice}, or `train_args.truncation_strategy: truncate`",
                advice=fix,
            )
        return ConfigError(
            "{subject}, and no answer starts before that",
            code="no-answer-before-limit",
            fix=fix,
            subject=what,
        )
    refusals = tally.refusals.most_common(1)
    refusal = f". Error of the chat template: {refusals[0][0]}" if refusals else ""
    return ConfigError(
        "no row of `{source}` can be used. {drop_reasons}{refusal}",
        code="no-usable-rows",
        allowed=formats,
        fix="correct the rows, or {columns_fix}",
        source=source.label,
        drop_reasons=drop_reasons(counts),
        refusal=refusal,
        columns_fix=columns_fix(kind.mapping),
    )


def column_notices(source: ResolvedSource, tally: Tally, row: str = "row") -> list[Notice]:
    """Return messages about the format of a source and its unused columns.

    Args:
        row: name of a row that was read: "checked row" if only some rows were.
    """
    infos = []
    if len(tally.seen) > 1:
        counts = (f"{name} ({num_rows:,} rows)" for name, num_rows in tally.seen.most_common())
        infos.append(f"several formats: {', '.join(counts)}")
    elif source.spec.format == "auto" and tally.seen:
        infos.append(f"format {next(iter(tally.seen))}, detected from the columns")
    if tally.unused:
        infos.append(f"unused columns: {_names(tally.unused)}")
    if tally.ignored:
        infos.append(f"ignored by `ignore_columns`: {_names(tally.ignored)}")
    warnings = []
    missing = [
        name
        for name in source.spec.ignore_columns
        if name not in tally.ignored and name not in MEDIA
    ]
    if missing:
        warnings.append(f"no {row} has the columns {_names(missing)} of `ignore_columns`")
    unknown = [
        name
        for expected, name in source.spec.columns.items()
        if name and name not in tally.mapped and expected not in MESSAGE_KEYS
    ]
    if unknown:
        warnings.append(f"no {row} has the columns {_names(unknown)} of `columns`")
    if set(tally.binary_labels) & {"0", "1"} and "other" not in tally.binary_labels:
        warnings.append(
            "`label` has only the values 0 and 1 and is not used. If it marks good and bad"
            " answers, the model also learns the bad ones"
        )
    return [
        *(Notice("info", f"{source.label}: {text}") for text in infos),
        *(Notice("warning", f"{source.label}: {text}") for text in warnings),
    ]


def _names(names: Iterable[str]) -> str:
    # Text in parentheses after a name describes where it occurs.
    parts = (name.partition(" (") for name in names)
    return ", ".join(
        f"`{name}`{parenthesis}{where}" if name else "a column without a name"
        for name, parenthesis, where in parts
    )


def row_notices(counts: RowCounts, kind: SampleKind, tally: Tally) -> list[Notice]:
    """Return messages about the rows of all sources and how they are encoded."""
    config, facts = kind.config, tally.facts
    limit = config.train_args.max_length
    has_answers, formats = kind.has_answers, tally.seen
    num_pairs = formats["prompt_completion"] if has_answers else 0
    has_template = kind.template is not None
    dropped = counts.dropped.total()
    reason = "disabled in the data"
    if config.train_args.train_on_turns == "last":
        reason = "`train_args.train_on_turns: last`"
    every_token = "train_on_inputs: every token carries loss, not only the answers"
    if counts.excluded_turns:
        every_token += ", except in turns whose loss the data disables"
    warnings = [
        (dropped, f"{dropped:,} of {counts.read:,} rows dropped. {drop_reasons(counts)}"),
        (counts.truncated, f"{counts.truncated:,} samples truncated to max_length {limit:,}"),
        (
            facts[EQUAL_PAIRS],
            f"{counted(facts[EQUAL_PAIRS], 'pair')} of answers with the same tokens (first:"
            f" {counts.first.get(EQUAL_PAIRS)}): no preference can be learned from them. If the"
            " answers differ only after `max_length`, raise it",
        ),
        (
            facts["unplaced"],
            f"{facts['unplaced']:,} assistant turns are changed by the chat template and carry no"
            " loss",
        ),
        (
            facts["no_eos"],
            "the tokenizer has no end-of-text token: the model will not learn where to stop",
        ),
        (
            facts["no_end_of_turn"],
            f"the chat template adds no end-of-turn token to {facts['no_end_of_turn']:,} chats: the"
            " model will not learn where to stop",
        ),
        (
            facts["formatted"],
            f"{counted(facts['formatted'], 'sample')} with tokens of the chat template in a"
            " question: if the prompts are formatted already, set `chat_template: empty`, or write"
            " each sample to a column `text`",
        ),
        (
            config.system and not has_template,
            "`system` has no effect, because there is no chat template",
        ),
    ]
    infos = [
        (
            facts["documents_cut"],
            f"{facts['documents_cut']:,} documents cut into samples of {limit:,} tokens",
        ),
        (
            facts["lone_tokens"],
            f"{facts['lone_tokens']:,} last samples with a single token dropped: nothing to"
            " predict",
        ),
        (
            counts.excluded_turns,
            f"{counts.excluded_turns:,} assistant turns carry no loss ({reason})",
        ),
        (
            facts["other_template"],
            f"{facts['other_template']:,} chats with tools or reasoning use the tokenizer's chat"
            f" template, because `{config.chat_template}` does not support them",
        ),
        (
            facts["trailing_turns"],
            f"{facts['trailing_turns']:,} chats do not end with an answer; the turns after the last"
            " answer are removed",
        ),
        (
            num_pairs and has_template,
            "prompts and completions are formatted as user and assistant turns of the chat"
            " template",
        ),
        (
            num_pairs and not has_template,
            "no chat template: prompts and completions are concatenated, followed by the"
            " end-of-text token",
        ),
        (
            formats["text"] and has_answers,
            "plain text has no answers: every token of it carries loss",
        ),
        (has_answers and config.train_args.train_on_inputs, every_token),
    ]
    return [
        *(Notice("warning", text) for applies, text in warnings if applies),
        *(Notice("info", text) for applies, text in infos if applies),
    ]
