"""Messages about the rows of sources: their formats, unused columns, and why rows are dropped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from paceline.core.errors import ConfigError
from paceline.core.log import Notice
from paceline.core.texts import UserText, join_texts
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
    return join_texts(
        UserText(
            "{reason}: {num_rows} (first: {first})",
            code="drop-reason",
            reason=reason,
            num_rows=f"{num_rows:,}",
            first=counts.first[reason],
        )
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
            what, fix = "the columns of {shown} match no format", columns_fix(mapping)
        else:
            what = "the columns of {shown} do not match the format `{format}`"
            matches = matching_formats({key: [{}] for key in columns})
            fix = f"set `format: {matches[0]}` or remove it; " if matches else ""
            fix += columns_fix(mapping)
        return ConfigError(
            what,
            code="unknown-columns",
            allowed=formats,
            fix=fix,
            shown=shown,
            format=source.spec.format,
            formats=formats,
        )
    if dropped and set(dropped) <= {TOO_LONG, NO_ANSWER}:
        is_cut = TOO_LONG not in dropped
        return ConfigError(
            "every sample of `{source}` is too long: the shortest has {shortest} tokens,"
            " train_args.max_length is {max_length}, and no answer starts before that"
            if is_cut
            else "every sample of `{source}` is too long: the shortest has {shortest} tokens,"
            " train_args.max_length is {max_length}",
            code="no-answer-before-limit" if is_cut else "samples-too-long",
            fix="set `train_args.max_length` to at least {shortest}"
            if is_cut
            else "set `train_args.max_length` to at least {shortest}, or"
            " `train_args.truncation_strategy: truncate`",
            source=source.label,
            shortest=counts.shortest_overlong,
            max_length=kind.config.train_args.max_length,
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
        infos.append(
            UserText(
                "{source}: several formats: {formats}",
                code="several-formats",
                source=source.label,
                formats=", ".join(counts),
            )
        )
    elif source.spec.format == "auto" and tally.seen:
        infos.append(
            UserText(
                "{source}: format {format}, detected from the columns",
                code="format-detected",
                source=source.label,
                format=next(iter(tally.seen)),
            )
        )
    if tally.unused:
        infos.append(
            UserText(
                "{source}: unused columns: {columns}",
                code="unused-columns",
                source=source.label,
                columns=_names(tally.unused),
            )
        )
    if tally.ignored:
        infos.append(
            UserText(
                "{source}: ignored by `ignore_columns`: {columns}",
                code="ignored-columns",
                source=source.label,
                columns=_names(tally.ignored),
            )
        )
    warnings = _column_warnings(source, tally, row)
    return [
        *(Notice("info", text) for text in infos),
        *(Notice("warning", text) for text in warnings),
    ]


def _column_warnings(source: ResolvedSource, tally: Tally, row: str) -> list[UserText]:
    warnings = []
    missing = [
        name
        for name in source.spec.ignore_columns
        if name not in tally.ignored and name not in MEDIA
    ]
    if missing:
        warnings.append(
            UserText(
                "{source}: no {row} has the columns {columns} of `ignore_columns`",
                code="missing-ignored-columns",
                source=source.label,
                row=row,
                columns=_names(missing),
            )
        )
    unknown = [
        name
        for expected, name in source.spec.columns.items()
        if name and name not in tally.mapped and expected not in MESSAGE_KEYS
    ]
    if unknown:
        warnings.append(
            UserText(
                "{source}: no {row} has the columns {columns} of `columns`",
                code="missing-mapped-columns",
                source=source.label,
                row=row,
                columns=_names(unknown),
            )
        )
    if set(tally.binary_labels) & {"0", "1"} and "other" not in tally.binary_labels:
        warnings.append(
            UserText(
                "{source}: `label` has only the values 0 and 1 and is not used. If it marks good"
                " and bad answers, the model also learns the bad ones",
                code="label-column-not-used",
                source=source.label,
            )
        )
    return warnings


def _names(names: Iterable[str]) -> str:
    # Text in parentheses after a name describes where it occurs.
    parts = (name.partition(" (") for name in names)
    return ", ".join(
        f"`{name}`{parenthesis}{where}" if name else "a column without a name"
        for name, parenthesis, where in parts
    )


def row_notices(counts: RowCounts, kind: SampleKind, tally: Tally) -> list[Notice]:
    """Return messages about the rows of all sources and how they are encoded."""
    warnings = _row_warnings(counts, kind, tally.facts)
    infos = _row_infos(counts, kind, tally)
    return [
        *(Notice("warning", text) for applies, text in warnings if applies),
        *(Notice("info", text) for applies, text in infos if applies),
    ]


def _row_warnings(
    counts: RowCounts, kind: SampleKind, facts: Mapping[str, int]
) -> list[tuple[object, str]]:
    """Return each warning, and whether it applies."""
    config, dropped = kind.config, counts.dropped.total()
    return [
        (
            dropped,
            UserText(
                "{dropped} of {read} rows dropped. {reasons}",
                code="training-rows-dropped",
                dropped=f"{dropped:,}",
                read=f"{counts.read:,}",
                reasons=drop_reasons(counts),
            ),
        ),
        (
            counts.truncated,
            UserText(
                "{truncated} samples truncated to max_length {limit}",
                code="samples-truncated",
                truncated=f"{counts.truncated:,}",
                limit=f"{config.train_args.max_length:,}",
            ),
        ),
        (
            facts[EQUAL_PAIRS],
            UserText(
                "{pairs:pair} of answers with the same tokens (first: {first}): no preference"
                " can be"
                " learned from them. If the answers differ only after `max_length`, raise it",
                code="equal-answers",
                pairs=facts[EQUAL_PAIRS],
                first=counts.first.get(EQUAL_PAIRS),
            ),
        ),
        *_chat_warnings(facts),
        (
            config.system and kind.template is None,
            UserText(
                "`system` has no effect, because there is no chat template",
                code="system-without-template",
            ),
        ),
    ]


def _chat_warnings(facts: Mapping[str, int]) -> list[tuple[object, str]]:
    """Return each warning about what the chat template and the tokenizer do with the rows, and
    whether it applies."""
    return [
        (
            facts["unplaced"],
            UserText(
                "{turns} assistant turns are changed by the chat template and carry no loss",
                code="turns-changed-by-template",
                turns=f"{facts['unplaced']:,}",
            ),
        ),
        (
            facts["no_eos"],
            UserText(
                "the tokenizer has no end-of-text token: the model will not learn where to stop",
                code="no-end-of-text",
            ),
        ),
        (
            facts["no_end_of_turn"],
            UserText(
                "the chat template adds no end-of-turn token to {chats} chats: the model will"
                " not learn"
                " where to stop",
                code="no-end-of-turn",
                chats=f"{facts['no_end_of_turn']:,}",
            ),
        ),
        (
            facts["dropped_reasoning"],
            UserText(
                "the chat template leaves out the reasoning of {answers:answer}, which is not"
                " trained; most templates keep only the reasoning of the last turns",
                code="reasoning-left-out",
                answers=facts["dropped_reasoning"],
            ),
        ),
        (
            facts["formatted"],
            UserText(
                "{samples:sample} with tokens of the chat template in a question: if the prompts"
                " are"
                " formatted already, set `chat_template: empty`, or write each sample to a column"
                " `text`",
                code="template-tokens-in-questions",
                samples=facts["formatted"],
            ),
        ),
    ]


def _row_infos(counts: RowCounts, kind: SampleKind, tally: Tally) -> list[tuple[object, str]]:
    """Return each message, and whether it applies."""
    config, facts, limit = kind.config, tally.facts, kind.config.train_args.max_length
    has_answers, formats = kind.has_answers, tally.seen
    num_pairs = formats["prompt_completion"] if has_answers else 0
    has_template = kind.template is not None
    takes_last = config.train_args.train_on_turns == "last"
    reason = "`train_args.train_on_turns: last`" if takes_last else "disabled in the data"
    excepted = ", except in turns whose loss the data disables" if counts.excluded_turns else ""
    every_token = f"train_on_inputs: every token carries loss, not only the answers{excepted}"
    return [
        (
            facts["documents_cut"],
            UserText(
                "{documents} documents cut into samples of {limit} tokens",
                code="documents-cut",
                documents=f"{facts['documents_cut']:,}",
                limit=f"{limit:,}",
            ),
        ),
        (
            facts["lone_tokens"],
            UserText(
                "{samples} last samples with a single token dropped: nothing to predict",
                code="lone-tokens-dropped",
                samples=f"{facts['lone_tokens']:,}",
            ),
        ),
        (
            counts.excluded_turns,
            UserText(
                "{turns} assistant turns carry no loss ({reason})",
                code="turns-without-loss",
                turns=f"{counts.excluded_turns:,}",
                reason=reason,
            ),
        ),
        (
            facts["other_template"],
            UserText(
                "{chats} chats with tools or reasoning use the tokenizer's chat template, because"
                " `{template}` does not support them",
                code="chats-with-tokenizer-template",
                chats=f"{facts['other_template']:,}",
                template=config.chat_template,
            ),
        ),
        (
            facts["trailing_turns"],
            UserText(
                "{chats} chats do not end with an answer; the turns after the last answer are"
                " removed",
                code="trailing-turns-removed",
                chats=f"{facts['trailing_turns']:,}",
            ),
        ),
        (
            num_pairs and has_template,
            UserText(
                "prompts and completions are formatted as user and assistant turns of the chat"
                " template",
                code="prompts-as-turns",
            ),
        ),
        (
            num_pairs and not has_template,
            UserText(
                "no chat template: prompts and completions are concatenated, followed by the"
                " end-of-text token",
                code="prompts-concatenated",
            ),
        ),
        (
            formats["text"] and has_answers,
            UserText(
                "plain text has no answers: every token of it carries loss",
                code="loss-on-plain-text",
            ),
        ),
        (has_answers and config.train_args.train_on_inputs, every_token),
    ]
