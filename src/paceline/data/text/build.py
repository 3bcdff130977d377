"""Fill one entry of the token cache from its sources, and account for every row."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.events import DataFigures
from paceline.data.progress import Progress
from paceline.data.sources.readers import is_text
from paceline.data.sources.resolve import ResolvedSource
from paceline.data.text.chunks import (
    NO_ANSWER,
    TOO_LONG,
    EncodedChunk,
    RowCounts,
    Setup,
    chunks_of,
    converter_of,
    encoder_of,
)
from paceline.data.text.encode import Encoder
from paceline.data.text.formats import FORMATS, RowConverter, fits_as
from paceline.data.text.refused_rows import MEDIA
from paceline.data.text.templates import AskedTemplate
from paceline.data.text.token_dataset import TokenWriter
from paceline.data.text.tokenizer import load_tokenizer
from paceline.data.text.workers import encode_chunks, start_workers
from paceline.distributed.devices import cpu_cores

#: Less text than this is encoded sooner than worker processes have started.
_PARALLEL_BYTES = 16 << 20
_MOST_WORKERS = 32
_COLUMNS_FIX = (
    "say which column is which: `dataset: {path: ..., columns: {prompt: YOURS, completion: YOURS}}`"
)


class EntryMeta(TypedDict):
    """What the meta file of an entry says."""

    samples: int
    tokens: int
    label_tokens: int
    pad_token_id: int
    counts: DataFigures
    notices: list[tuple[str, str]]


def build_entry(
    folder: Path,
    sources: list[ResolvedSource],
    config: Config,
    task: str,
    tokenizer_folder: Path,
    template: AskedTemplate,
    workers: int | None = None,
) -> EntryMeta:
    """Tokenise ``sources`` into ``folder``; the returned value says what is in it (counts, notices,
    pad token).

    Args:
        workers: processes that encode; None: as many as pay. What is written does not depend on it.

    Raises:
        ConfigError: no row could be used; the text says why.
    """
    num_workers = _workers(sources) if workers is None else workers
    with start_workers(num_workers) as pool:
        tokenizer = load_tokenizer(tokenizer_folder, config.trust_remote_code)
        text, notices = template.choose(tokenizer)
        for_tools = template.for_tools(tokenizer)
        encoder = encoder_of(config, task, tokenizer, text, for_tools)
        is_sent = None if tokenizer.python is not None else tokenizer
        setup = Setup(
            config,
            task,
            tokenizer_folder,
            is_sent,
            text,
            for_tools,
            tuple(source.spec for source in sources),
        )
        results = [
            _SourceResult(source, converter_of(source, encoder, config)) for source in sources
        ]
        chunks = (
            chunk
            for number, source in enumerate(sources)
            for chunk in chunks_of(number, source, config.train_args.seed)
        )
        encoded = encode_chunks(chunks, setup, encoder, pool, num_workers, folder / "setup.pickle")
        writer = TokenWriter(folder)
        progress = Progress(_text_bytes(sources))
        try:
            _write_all(encoded, results, encoder, config, writer, progress)
        finally:
            progress.close()
            writer.close()
    return _described(results, notices, writer, encoder, config, tokenizer.pad_token_id)


@dataclass
class _SourceResult:
    """What became of a source's rows; the converter holds the counters."""

    source: ResolvedSource
    converter: RowConverter
    account: RowCounts = field(default_factory=RowCounts)


def _write_all(
    chunks: Iterable[EncodedChunk],
    results: list[_SourceResult],
    encoder: Encoder,
    config: Config,
    writer: TokenWriter,
    progress: Progress,
) -> None:
    """Write all samples, add up what was counted, and check at the end of each source that some of
    its rows were kept."""
    facts: Counter[str] = Counter()
    refusals: Counter[str] = Counter()

    def finish(result: _SourceResult) -> None:
        encoder.facts, encoder.refusals = facts, refusals
        if result.account.read == 0:
            raise ConfigError(
                f"the dataset `{result.source.label}` has no rows",
                fix="check that this is the file you meant",
            )
        if result.account.kept == 0:
            raise _nothing_kept(result.source, result.converter, encoder, result.account, config)

    current = 0
    for encoded in chunks:
        for result in results[current : encoded.source]:
            finish(result)
        current = encoded.source
        result = results[current]
        writer.extend(encoded.tokens, encoded.mask, encoded.lengths, encoded.label_counts)
        result.account.add(encoded.account)
        for name, counter in encoded.converted.items():
            getattr(result.converter, name).update(counter)
        facts.update(encoded.facts)
        refusals.update(encoded.refusals)
        progress.add(encoded.account.read, encoded.size_bytes)
    for result in results[current:]:
        finish(result)


def _described(
    results: list[_SourceResult],
    notices: list[tuple[str, str]],
    writer: TokenWriter,
    encoder: Encoder,
    config: Config,
    pad_token_id: int,
) -> EntryMeta:
    """What the entry's meta file says."""
    total = RowCounts()
    formats: Counter[str] = Counter()
    for result in results:
        if len(results) > 1:
            notices.append(
                (
                    "info",
                    (
                        f"{result.source.label}: {result.account.read:,} rows read,"
                        f" {result.account.kept:,} kept"
                    ),
                )
            )
        total.add(result.account)
        notices += _about_columns(result.source, result.converter)
        formats.update(result.converter.seen)
    notices += _about_rows(total, encoder, formats, config)
    return {
        "samples": len(writer.lengths),
        "tokens": sum(writer.lengths),
        "label_tokens": sum(writer.label_counts),
        "pad_token_id": pad_token_id,
        "counts": total.counts(),
        "notices": notices,
    }


def _text_bytes(sources: list[ResolvedSource]) -> int | None:
    sizes = [one.text_bytes() for one in sources]
    return None if None in sizes else sum(one for one in sizes if one is not None)


def _workers(sources: list[ResolvedSource]) -> int:
    """How many processes encode: one for each core, if there is so much to do that starting them
    pays."""
    size = _text_bytes(sources)
    # Whole documents are few: the tokenizer itself works on the pieces of one on all cores.
    documents = all(is_text(file) for one in sources for file in one.files) and all(
        one.hub is None for one in sources
    )
    if documents or (size is not None and size < _PARALLEL_BYTES):
        return 1
    return min(cpu_cores(), _MOST_WORKERS)


# -- words
def _reasons(account: RowCounts) -> str:
    each = (
        f"{reason}: {number:,} (first: {account.first[reason]})"
        for reason, number in account.dropped.most_common()
    )
    return "; ".join(each)


def _nothing_kept(
    source: ResolvedSource,
    converter: RowConverter,
    encoder: Encoder,
    account: RowCounts,
    config: Config,
) -> ConfigError:
    dropped = account.dropped
    if converter.misfits and sum(converter.misfits.values()) == sum(dropped.values()):
        columns = next(iter(converter.misfits))
        named = converter.named != "auto"
        fitting = fits_as({key: [{}] for key in columns}) if named else []
        return ConfigError(
            f"the columns of `{source.label}` fit "
            + (f"not the format `{converter.named}`" if named else "no format")
            + f"; found: {', '.join(columns) or 'none'}",
            allowed="; ".join(f"{name}: {needs}" for name, needs in FORMATS.items()),
            fix=(f"name the format `{fitting[0]}` or leave it out; " if fitting else "")
            + _COLUMNS_FIX,
        )
    if dropped and set(dropped) <= {TOO_LONG, NO_ANSWER}:
        return ConfigError(
            f"every sample of `{source.label}` is too long: the shortest has"
            f" {account.shortest_overlong:,} tokens, train_args.max_length is"
            f" {config.train_args.max_length:,}"
            + ("" if TOO_LONG in dropped else ", and no answer begins before that"),
            fix=f"set `train_args.max_length` to {account.shortest_overlong} or more"
            + (", or `train_args.truncation_strategy: truncate`" if TOO_LONG in dropped else ""),
        )
    refusal = (
        f". The template says: {encoder.refusals.most_common(1)[0][0]}" if encoder.refusals else ""
    )
    return ConfigError(
        f"no row of `{source.label}` can be used. {_reasons(account)}{refusal}",
        allowed="; ".join(f"{name}: {needs}" for name, needs in FORMATS.items()),
        fix=f"correct the rows, or {_COLUMNS_FIX}",
    )


def _about_columns(source: ResolvedSource, converter: RowConverter) -> list[tuple[str, str]]:
    notices = []
    if len(converter.seen) > 1:
        found = ", ".join(
            f"{name} ({number:,} rows)" for name, number in converter.seen.most_common()
        )
        notices.append(("info", f"{source.label}: several formats: {found}"))
    elif converter.named == "auto" and converter.seen:
        notices.append(
            ("info", f"{source.label}: format {next(iter(converter.seen))}, found from the columns")
        )
    if converter.unused:
        notices.append(
            ("info", f"{source.label}: columns that are not used: {_names(converter.unused)}")
        )
    if converter.ignored:
        notices.append(
            ("info", f"{source.label}: left out by `ignore_columns`: {_names(converter.ignored)}")
        )
    never = [
        name
        for name in converter.ignore_columns
        if name not in converter.ignored and name not in MEDIA
    ]
    if never:
        notices.append(
            (
                "warning",
                f"{source.label}: no row has the columns of `ignore_columns` {_names(never)}",
            )
        )
    if set(converter.binary_labels) & {"0", "1"} and "other" not in converter.binary_labels:
        text = (
            "`label` holds only 0 and 1 and is not used. If it marks good and bad answers, the bad"
            " ones are trained on too"
        )
        notices.append(("warning", f"{source.label}: {text}"))
    return notices


def _names(names: Iterable[str]) -> str:
    # what follows the name says where it was found
    parts = (name.partition(" (") for name in names)
    return ", ".join(f"`{name}`{mark}{place}" for name, mark, place in parts)


def _about_rows(
    account: RowCounts, encoder: Encoder, formats: Counter[str], config: Config
) -> list[tuple[str, str]]:
    limit, facts = config.train_args.max_length, encoder.facts
    pairs, answers = formats["prompt_completion"], not encoder.pretrain
    dropped = sum(account.dropped.values())
    excluded_by = "switched off in the data"
    if config.train_args.train_on_turns == "last":
        excluded_by = "`train_args.train_on_turns: last`"
    warnings = [
        (dropped, f"{dropped:,} of {account.read:,} rows dropped. {_reasons(account)}"),
        (account.truncated, f"{account.truncated:,} samples truncated to max_length {limit:,}"),
        (
            facts["unplaced"],
            (
                f"{facts['unplaced']:,} assistant turns were rewritten by the chat template; no"
                " loss on those"
            ),
        ),
        (
            facts["no_eos"],
            "the tokenizer has no end-of-text token: the model will not learn where to stop",
        ),
        (
            facts["no_end_of_turn"],
            (
                f"the chat template puts no end-of-turn token after {facts['no_end_of_turn']:,}"
                " chats: the model will not learn where to stop"
            ),
        ),
        (
            config.system and encoder.template is None,
            "`system` has no effect: there is no chat template",
        ),
    ]
    infos = [
        (
            account.documents_cut,
            f"{account.documents_cut:,} documents cut into samples of {limit:,} tokens",
        ),
        (
            account.lone_tokens,
            (
                f"{account.lone_tokens:,} last samples of one token left off: there is nothing to"
                " predict"
            ),
        ),
        (
            account.excluded_turns,
            f"{account.excluded_turns:,} turns of the assistant carry no loss ({excluded_by})",
        ),
        (
            facts["other_template"],
            (
                f"{facts['other_template']:,} chats with tools or reasoning are written with the"
                f" tokenizer's own chat template, because `{config.chat_template}` does not write"
                " these"
            ),
        ),
        (
            facts["left_off"],
            (
                f"{facts['left_off']:,} chats end with a turn that is no answer; those turns are"
                " left off"
            ),
        ),
        (
            pairs and answers and encoder.template is not None,
            "prompts and completions are put into the chat template as user and assistant",
        ),
        (
            pairs and answers and encoder.template is None,
            (
                "no chat template: prompts and completions are joined as they are, the end-of-text"
                " token after them"
            ),
        ),
        (formats["text"] and answers, "plain text has no answers: every token of it carries loss"),
        (
            answers and config.train_args.train_on_inputs,
            "train_on_inputs: every token carries loss, not the answers alone"
            + (
                ", except on the turns that the data switches off" if account.excluded_turns else ""
            ),
        ),
    ]
    return [("warning", text) for applies, text in warnings if applies] + [
        ("info", text) for applies, text in infos if applies
    ]
