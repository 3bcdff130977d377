"""Fill one entry of the token cache from its sources, and account for every row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.interruption import poll
from paceline.data.chat import ChatTemplate
from paceline.data.encode import Encoded, Encoder
from paceline.data.formats import FORMATS, Converter, Malformed, Sample, Unsupported, fits_as
from paceline.data.media import MEDIA
from paceline.data.sources import OpenSource, Place
from paceline.data.templates import AskedTemplate
from paceline.data.token_dataset import TokenWriter
from paceline.data.tokenizer import LoadedTokenizer, load_tokenizer

_BATCH_ROWS, _BATCH_CHARS = 1024, 4 << 20
_COLUMNS_FIX = "say which column is which: `dataset: {path: ..., columns: {prompt: YOURS, completion: YOURS}}`"
_TOO_LONG, _NO_ANSWER = "longer than max_length", "no answer left after truncation"


@dataclass
class _Account:
    """What became of the rows of one entry, and where the first of each kind of dropped row stood."""

    read: int = 0
    kept: int = 0
    truncated: int = 0
    documents_cut: int = 0
    lone_tokens: int = 0
    excluded_turns: int = 0
    shortest_overlong: int | None = None
    dropped: Counter[str] = field(default_factory=Counter)
    first: dict[str, Place] = field(default_factory=dict)

    def add(self, other: _Account) -> None:
        """Take in the account of another source."""
        for name in ("read", "kept", "truncated", "documents_cut", "lone_tokens", "excluded_turns"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.dropped.update(other.dropped)
        self.first = {**other.first, **self.first}

    def drop(self, reason: str, place: Place) -> None:
        self.dropped[reason] += 1
        self.first.setdefault(reason, place)

    def counts(self) -> dict[str, Any]:
        out = {"read": self.read, "kept": self.kept, "truncated": self.truncated, "dropped": dict(self.dropped)}
        return {**out, "excluded_turns": self.excluded_turns}


def build_entry(
    folder: Path, sources: list[OpenSource], config: Config, task: str, tokenizer_folder: Path, template: AskedTemplate
) -> dict[str, Any]:
    """Tokenise ``sources`` into ``folder``; the returned value says what is in it (counts, notices, pad token).

    Raises:
        ConfigError: no row could be used; the text says why.
    """
    tokenizer = load_tokenizer(tokenizer_folder, config.trust_remote_code)
    source, notices = template.choose(tokenizer)
    encoder = encoder_of(config, task, tokenizer, source)
    total = _Account()
    writer = TokenWriter(folder)
    formats: Counter[str] = Counter()
    try:
        for one in sources:
            converter = converter_of(one, encoder, config)
            account = _Account()
            _fill(writer, one, converter, encoder, account, config)
            if account.read == 0:
                raise ConfigError(f"the dataset `{one.label}` has no rows", fix="check that this is the file you meant")
            if account.kept == 0:
                raise _nothing_kept(one, converter, encoder, account, config)
            if len(sources) > 1:
                notices.append(("info", f"{one.label}: {account.read:,} rows read, {account.kept:,} kept"))
            total.add(account)
            notices += _about_columns(one, converter)
            formats.update(converter.seen)
    finally:
        writer.close()
    notices += _about_rows(total, encoder, formats, config)
    return {
        "samples": len(writer.lengths),
        "tokens": sum(writer.lengths),
        "label_tokens": sum(writer.label_counts),
        "pad_token_id": tokenizer.pad_token_id,
        "counts": total.counts(),
        "notices": notices,
    }


def encoder_of(config: Config, task: str, tokenizer: LoadedTokenizer, template: str | None) -> Encoder:
    """The encoder of a config's samples; ``template`` is the source of the chat template."""
    return Encoder(
        tokenizer,
        ChatTemplate(template, tokenizer.special_tokens) if template else None,
        pretrain=task == "pretrain",
        train_on_inputs=config.train_args.train_on_inputs,
        last_turn_only=config.train_args.train_on_turns == "last",
        system=config.system,
    )


def converter_of(source: OpenSource, encoder: Encoder, config: Config) -> Converter:
    """What turns the rows of ``source`` into samples for ``encoder``."""
    given = source.given
    return Converter(
        source.label, given.format, given.columns, config.system, encoder.pretrain,
        ignore_columns=given.ignore_columns, roles=given.roles, template=encoder.template,
    )  # fmt: skip


def refusal(error: Unsupported, place: Place) -> ConfigError:
    """The error that ends the preparation of a dataset with a row for another kind of training."""
    return ConfigError(f"{place}: {error.what}", allowed=error.allowed, fix=error.fix)


def _fill(
    writer: TokenWriter, source: OpenSource, converter: Converter, encoder: Encoder, account: _Account, config: Config
) -> None:
    for batch in _batches(source, converter, account, config.train_args.seed):
        poll()
        encoded = encoder([sample for _, sample in batch])
        for (place, _), one in zip(batch, encoded, strict=True):
            if isinstance(one, str):
                account.drop(one, place)
            elif one.is_document:
                _cut(writer, one, account, config.train_args.max_length)
            else:
                _add(writer, one, place, account, config)


def _batches(source: OpenSource, converter: Converter, account: _Account, seed: int) -> Iterator[list[tuple[Place, Sample]]]:
    batch: list[tuple[Place, Sample]] = []
    size = 0
    for place, row in source.rows(seed):
        account.read += 1
        try:
            sample = converter(row)
        except Malformed as reason:
            account.drop(str(reason), place)
            continue
        except Unsupported as error:
            raise refusal(error, place) from None
        batch.append((place, sample))
        size += len(sample.text or "")
        if len(batch) >= _BATCH_ROWS or size >= _BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _add(writer: TokenWriter, one: Encoded, place: Place, account: _Account, config: Config) -> None:
    limit = config.train_args.max_length
    ids, mask = one.input_ids, one.labels_mask
    if not mask[1:].any():
        account.drop("nothing to learn from", place)
        return
    if len(ids) > limit:
        account.shortest_overlong = min(len(ids), account.shortest_overlong or len(ids))
        if config.train_args.overlong == "drop":
            account.drop(_TOO_LONG, place)
            return
        ids, mask = ids[:limit], mask[:limit]
        if not mask[1:].any():
            account.drop(_NO_ANSWER, place)
            return
        account.truncated += 1
    account.kept += 1
    account.excluded_turns += one.excluded_turns
    writer.add(ids, mask)


def _cut(writer: TokenWriter, one: Encoded, account: _Account, limit: int) -> None:
    """A document becomes consecutive samples of ``limit`` tokens, the last one shorter; one lone token predicts nothing."""
    account.kept += 1
    account.documents_cut += len(one.input_ids) > limit
    for start in range(0, len(one.input_ids), limit):
        ids = one.input_ids[start : start + limit]
        if len(ids) < 2:
            account.lone_tokens += 1
            continue
        writer.add(ids, one.labels_mask[start : start + limit])


# -- words ----------------------------------------------------------------------------------------------------------------
def _reasons(account: _Account) -> str:
    each = (f"{reason}: {number:,} (first: {account.first[reason]})" for reason, number in account.dropped.most_common())
    return "; ".join(each)


def _nothing_kept(source: OpenSource, converter: Converter, encoder: Encoder, account: _Account, config: Config) -> ConfigError:
    dropped = account.dropped
    if converter.misfits and sum(converter.misfits.values()) == sum(dropped.values()):
        columns = next(iter(converter.misfits))
        named = converter.named != "auto"
        fitting = fits_as({key: [{}] for key in columns}) if named else []
        return ConfigError(
            f"the columns of `{source.label}` fit " + (f"not the format `{converter.named}`" if named else "no format")
            + f"; found: {', '.join(columns) or 'none'}",
            allowed="; ".join(f"{name}: {needs}" for name, needs in FORMATS.items()),
            fix=(f"name the format `{fitting[0]}` or leave it out; " if fitting else "")
            + _COLUMNS_FIX,
        )  # fmt: skip
    if dropped and set(dropped) <= {_TOO_LONG, _NO_ANSWER}:
        return ConfigError(
            f"every sample of `{source.label}` is too long: the shortest has {account.shortest_overlong:,} tokens, "
            f"train_args.max_length is {config.train_args.max_length:,}"
            + ("" if _TOO_LONG in dropped else ", and no answer begins before that"),
            fix=f"set `train_args.max_length` to {account.shortest_overlong} or more"
            + (", or `train_args.overlong: truncate`" if _TOO_LONG in dropped else ""),
        )
    refusal = f". The template says: {encoder.refusals.most_common(1)[0][0]}" if encoder.refusals else ""
    return ConfigError(
        f"no row of `{source.label}` can be used. {_reasons(account)}{refusal}",
        allowed="; ".join(f"{name}: {needs}" for name, needs in FORMATS.items()),
        fix=f"correct the rows, or {_COLUMNS_FIX}",
    )


def _about_columns(source: OpenSource, converter: Converter) -> list[tuple[str, str]]:
    notices = []
    if len(converter.seen) > 1:
        found = ", ".join(f"{name} ({number:,} rows)" for name, number in converter.seen.most_common())
        notices.append(("info", f"{source.label}: several formats: {found}"))
    elif converter.named == "auto" and converter.seen:
        notices.append(("info", f"{source.label}: format {next(iter(converter.seen))}, found from the columns"))
    if converter.unused:
        notices.append(("info", f"{source.label}: columns that are not used: {_names(converter.unused)}"))
    if converter.ignored:
        notices.append(("info", f"{source.label}: left out by `ignore_columns`: {_names(converter.ignored)}"))
    never = [name for name in converter.ignore_columns if name not in converter.ignored and name not in MEDIA]
    if never:
        notices.append(("warning", f"{source.label}: no row has the columns of `ignore_columns` {_names(never)}"))
    if set(converter.binary_labels) & {"0", "1"} and "other" not in converter.binary_labels:
        text = "`label` holds only 0 and 1 and is not used. If it marks good and bad answers, the bad ones are trained on too"
        notices.append(("warning", f"{source.label}: {text}"))
    return notices


def _names(names: Iterable[str]) -> str:
    parts = (name.partition(" (") for name in names)  # what follows the name says where it was found
    return ", ".join(f"`{name}`{mark}{place}" for name, mark, place in parts)


def _about_rows(account: _Account, encoder: Encoder, formats: Counter[str], config: Config) -> list[tuple[str, str]]:
    limit, facts = config.train_args.max_length, encoder.facts
    pairs, answers = formats["prompt_completion"], not encoder.pretrain
    dropped = sum(account.dropped.values())
    excluded_by = "switched off in the data"
    if config.train_args.train_on_turns == "last":
        excluded_by = "`train_args.train_on_turns: last`"
    warnings = [
        (dropped, f"{dropped:,} of {account.read:,} rows dropped. {_reasons(account)}"),
        (account.truncated, f"{account.truncated:,} samples truncated to max_length {limit:,}"),
        (facts["unplaced"], f"{facts['unplaced']:,} assistant turns were rewritten by the chat template; no loss on those"),
        (facts["no_eos"], "the tokenizer has no end-of-text token: the model will not learn where to stop"),
        (
            facts["no_end_of_turn"],
            f"the chat template puts no end-of-turn token after {facts['no_end_of_turn']:,} chats: the model will not learn "
            "where to stop",
        ),
        (config.system and encoder.template is None, "`system` has no effect: there is no chat template"),
    ]
    infos = [
        (account.documents_cut, f"{account.documents_cut:,} documents cut into samples of {limit:,} tokens"),
        (account.lone_tokens, f"{account.lone_tokens:,} last samples of one token left off: there is nothing to predict"),
        (account.excluded_turns, f"{account.excluded_turns:,} turns of the assistant carry no loss ({excluded_by})"),
        (facts["left_off"], f"{facts['left_off']:,} chats end with a turn that is no answer; those turns are left off"),
        (
            pairs and answers and encoder.template is not None,
            "prompts and completions are put into the chat template as user and assistant",
        ),
        (
            pairs and answers and encoder.template is None,
            "no chat template: prompts and completions are joined as they are, the end-of-text token after them",
        ),
        (formats["text"] and answers, "plain text has no answers: every token of it carries loss"),
        (
            answers and config.train_args.train_on_inputs,
            "train_on_inputs: every token carries loss, not the answers alone"
            + (", except on the turns that the data switches off" if account.excluded_turns else ""),
        ),
    ]
    said = [("warning", *one) for one in warnings] + [("info", *one) for one in infos]
    return [(level, text) for level, is_so, text in said if is_so]
