"""Choose whether a run streams its data. Imports little, because every start needs the choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.config.schema import Config
from paceline.core.errors import NotStreamable
from paceline.core.files import human_bytes
from paceline.core.log import Notice
from paceline.core.texts import UserText
from paceline.data.sources.opening import is_url, take_count
from paceline.data.sources.resolve import is_local, open_source

if TYPE_CHECKING:
    from paceline.data.streaming.prepare import PreparedStream
    from paceline.data.text.new_tokens import ResolveModel

#: `streaming: auto` streams more text than this.
AUTO_BYTES = 1 << 30


def try_stream(
    config: Config, kind: str, resolve_model: ResolveModel
) -> tuple[PreparedStream | None, list[Notice]]:
    """Return the stream of a run, or None and a message if ``streaming: auto`` does not stream.

    With ``streaming: auto`` this depends only on the config and the files, so that the order of
    samples is the same on every host and at every start.

    Raises:
        ConfigError: as :func:`prepare_stream`.
    """
    is_auto = config.streaming == "auto"
    has_urls = any(is_url(source.path) for source in config.sources())
    size = None if has_urls or not is_auto else _local_bytes(config)
    if not config.streaming or (is_auto and not has_urls and (size or 0) <= AUTO_BYTES):
        return None, []
    from paceline.data.streaming.prepare import prepare_stream

    try:
        if conflict := config.streaming_conflict():
            setting, reason, fix = conflict
            raise NotStreamable(
                "{setting} is not supported with streaming: {reason}",
                code="not-streamable",
                fix=fix,
                setting=setting,
                reason=reason,
            )
        return prepare_stream(config, kind, resolve_model), []
    except NotStreamable as error:
        if has_urls or not is_auto:
            raise
        text = UserText(
            "streaming: off for {size} of text (`streaming: auto`), so all rows are tokenized"
            " before training starts. {reason}",
            code="streaming-off",
            size=human_bytes(size or 0),
            reason=error.what,
        )
        return None, [Notice("info", text)]


def _local_bytes(config: Config) -> int | None:
    """Return the approximate size of the text, or None if a source is not a local file."""
    sources = config.sources()
    if not all(is_local(take_count(source.path)[0]) for source in sources):
        return None
    return sum(open_source(source).text_bytes() or 0 for source in sources)
