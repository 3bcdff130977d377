"""Open data files that may be compressed (gzip, bzip2, xz, zstd) and may be UTF-8 or UTF-16
text."""

import bz2
import codecs
import glob
import gzip
import io
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from paceline.core.errors import ConfigError, did_you_mean, first_line
from paceline.data.sources.encodings import guess_encodings, is_mostly_utf8

#: Suffixes of compressed files; the suffix before shows the type of the data (``rows.jsonl.gz``).
COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".zstd")
_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
#: Byte order marks. The UTF-32 marks begin with the UTF-16 marks, so they are tested first.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
HEAD_BYTES = 4096
#: Number of bytes from which an encoding is guessed, and of alternatives that are shown.
_GUESSED_BYTES, _SHOWN_GUESSES = 1 << 16, 2
#: Number of characters that are not ASCII from which a guess at the head of a file is an error.
_MIN_RATED = 4
#: N of ``path#N``, or the share of ``path#P%``.
Take = int | float
_DRIVE = re.compile(r"([A-Za-z]):[\\/]+")
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
_TAKE = re.compile(r"(.+)#(?:(\d[\d_,]*)|(\d+(?:\.\d+)?)%)")


def data_suffix(path: Path) -> str:
    """Return the suffix that shows the type of the data, in lower case: ``.jsonl`` for
    ``rows.JSONL`` and ``rows.jsonl.gz``."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSED_SUFFIXES else suffix


def take_count(spec: str, noun: str = "rows") -> tuple[str, Take | None]:
    """Split ``path#N`` into the path and N, and ``path#P%`` into the path and a share. A path that
    exists under its full name has neither. Backslashes of a path of Windows are slashes.

    Raises:
        ConfigError: N is 0, or P is not above 0 and at most 100.
    """
    name = spec.strip()
    cut = _TAKE.fullmatch(name)
    if Path(name).expanduser().exists() or cut is None:
        return with_slashes(name), None
    path, number, percentage = cut.groups()
    take: Take = int(re.sub("[_,]", "", number)) if number else float(percentage) / 100
    if not take:
        raise ConfigError(
            "`{spec}` selects 0 {noun}",
            code="selects-no-rows",
            allowed="`path#N` with N of at least 1",
            spec=spec,
            noun=noun,
        )
    if percentage and take > 1:
        raise ConfigError(
            "`{spec}` selects more than all {noun}",
            code="selects-too-many-rows",
            allowed="at most `path#100%`",
            spec=spec,
            noun=noun,
        )
    return with_slashes(path), take


def with_slashes(name: str) -> str:
    r"""Return a path of Windows (``data\a.jsonl``) as a path of this system, if that one exists; a
    drive ``C:`` is the folder ``/mnt/c``, as in WSL. Return other names unchanged."""
    is_windows = "\\" in name or _DRIVE.match(name) is not None
    if not is_windows or Path(name).expanduser().exists():
        return name
    path = name.replace("\\", "/")
    if drive := _DRIVE.match(path):
        path = f"/mnt/{drive[1].lower()}/{path[drive.end() :]}"
    if is_pattern(path):
        parts = expand_braces(os.path.expanduser(path))
        return path if any(glob.glob(part, recursive=True) for part in parts) else name
    return path if Path(path).expanduser().exists() else name


def windows_fix(name: str) -> str | None:
    """Return how to correct a path that does not exist, if it is one of Windows or if a backslash
    in it was read as an escape; else None."""
    if any(character < " " for character in name):
        return "a backslash in double quotes is an escape: write the path with slashes"
    if drive := _DRIVE.match(name):
        rest = name[drive.end() :].replace("\\", "/")
        return (
            "this is a path of Windows, and this system has no drives: copy the files, or in WSL"
            f" use `/mnt/{drive[1].lower()}/{rest}`"
        )
    return None


def similar_path(path: Path, otherwise: str = "") -> str:
    """Return a question for the most similar name in the folder of a path that does not exist;
    ``otherwise`` if none is similar."""
    is_folder = path.parent.is_dir()
    siblings = [entry.name for entry in path.parent.iterdir()] if is_folder else []
    return did_you_mean(path.name, siblings, otherwise, f"`{path.parent / '{}'}`")


def number_to_take(take: Take, total: int) -> int:
    """Return the number of rows to select from ``total`` rows. It may be more than these."""
    return take if isinstance(take, int) else max(1, round(take * total))


def is_pattern(name: str) -> bool:
    """Return whether a name stands for several files."""
    return any(character in name for character in "*?[") or _BRACES.search(name) is not None


def is_url(name: str) -> bool:
    """Return whether a source is a URL."""
    return "://" in name


def expand_braces(pattern: str) -> list[str]:
    """Return the names that a pattern such as ``train-{000..127}.tar`` stands for."""
    match = _BRACES.search(pattern)
    if match is None:
        return [pattern]
    first, last = match.groups()
    before, after = pattern[: match.start()], pattern[match.end() :]
    numbers = range(int(first), int(last) + 1)
    return [
        name
        for number in numbers
        for name in expand_braces(f"{before}{number:0{len(first)}}{after}")
    ]


class Position:
    """The share of a file that has been read, from 0 to 1. Readers set the function that computes
    it with :meth:`follow`."""

    def __init__(self) -> None:
        self._current: Callable[[], float] = float

    def follow(self, current: Callable[[], float]) -> None:
        self._current = current

    @property
    def share(self) -> float:
        return min(1.0, self._current())


def _open_zstd(raw: IO[bytes]) -> IO[bytes]:
    import pyarrow as pa

    return io.BufferedReader(pa.input_stream(raw, compression="zstd"), 1 << 18)


_OPENERS: dict[str, Callable[[IO[bytes]], Any]] = {
    "gzip": gzip.open,
    "bzip2": bz2.open,
    "xz": lzma.open,
    "zstd": _open_zstd,
}


@contextmanager
def open_data(path: Path, position: Position | None = None) -> Iterator[IO[bytes]]:
    """Open a file for reading bytes. It is decompressed if its first bytes show that it is
    compressed, whatever its name.

    Args:
        position: set to follow the position in the (compressed) file.

    Raises:
        ConfigError: the compressed data is damaged or incomplete; also raised for errors inside the
            ``with`` block.
    """
    kind = compression_of(path)
    raw = open(path, "rb")  # noqa: SIM115  (closed below)
    handle: IO[bytes] = raw
    try:
        size = max(1, os.fstat(raw.fileno()).st_size)
        if position is not None:
            position.follow(lambda: 1.0 if raw.closed else raw.tell() / size)
        if kind is not None:
            handle = _OPENERS[kind](raw)
        yield handle
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if kind is None:
            raise
        reason = first_line(error) if str(error) else "unexpected end of file"
        raise ConfigError(
            "`{path}` cannot be decompressed as {kind}: {reason}",
            code="damaged-compressed-file",
            fix="check the file; it may have been truncated while it was copied",
            path=path,
            kind=kind,
            reason=reason,
        ) from error
    finally:
        handle.close()
        raw.close()


def compression_of(path: Path) -> str | None:
    """Return the compression method that the first bytes of a file show, or None."""
    with open(path, "rb") as handle:
        head = handle.read(6)
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)


#: The first bytes of files that are not text, what they are, and what to do.
_NOT_TEXT = {
    b"PK\x03\x04": (
        "a spreadsheet of Excel or another zip archive",
        "save the sheet as CSV in UTF-8, or unpack the archive",
    ),
    b"\xd0\xcf\x11\xe0": (
        "a document of an older Excel or Word",
        "save the sheet as CSV in UTF-8, or the text as .txt",
    ),
    b"PAR1": ("Parquet", "rename the file to `{stem}.parquet`"),
    b"ARROW1": ("Arrow", "rename the file to `{stem}.arrow`"),
    b"SQLite format 3": ("an SQLite database", "export the table as CSV"),
    b"%PDF-": ("a PDF document", "save its text as .txt"),
}


def encoding_of(head: bytes, path: Path) -> str:
    """Return the encoding of a text from its byte order mark, or UTF-8 without one.

    Raises:
        ConfigError: the bytes are UTF-16 without a byte order mark, or not text.
    """
    for magic, (kind, fix) in _NOT_TEXT.items():
        if head.startswith(magic) and b"\0" in head:
            raise ConfigError(
                "the content of `{path}` is {kind}, and not text as its name says",
                code="binary-content",
                fix=fix.format(stem=path.stem),
                path=path,
                kind=kind,
            )
    for mark, name in _MARKS:
        if head.startswith(mark):
            return name
    if b"\0" not in head:
        return "utf-8"
    even, odd = head[0::2].count(0), head[1::2].count(0)
    if max(even, odd) * 4 > len(head) and min(even, odd) * 8 < max(even, odd):
        order = "le" if odd > even else "be"
        raise ConfigError(
            "`{path}` appears to be UTF-16 without a byte order mark",
            code="utf16-without-mark",
            allowed="UTF-8, or UTF-16 with a byte order mark",
            fix="convert the file: `iconv -f utf-16{order} -t utf-8 {quoted_path}`",
            path=path,
            order=order,
            quoted_path=path.name,
        )
    raise ConfigError(
        "`{path}` is not text: it contains zero bytes",
        code="binary-file",
        allowed="UTF-8, or UTF-16 with a byte order mark",
        fix="check the file",
        path=path,
    )


def text_lines(handle: IO[bytes], path: Path) -> Iterator[str]:
    """Yield the decoded lines of a text with their line ends, without a byte order mark.

    Raises:
        ConfigError: bytes are invalid in the file's encoding; names the line.
    """
    head = handle.peek(HEAD_BYTES)[:HEAD_BYTES] if hasattr(handle, "peek") else b""
    encoding = encoding_of(head, path)
    has_returns = ends_with_returns(head, path)
    if not encoding.startswith("utf-8"):
        yield from _wide_lines(handle, path, encoding, "\r" if has_returns else "\n")
        return
    lines = handle.read().splitlines(keepends=True) if has_returns else handle
    for number, raw in enumerate(lines, 1):
        line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise not_text(path, f"line {number}", error) from error


def ends_with_returns(head: bytes, path: Path) -> bool:
    """Return whether the lines of a file end with carriage returns alone (CR), as those that some
    versions of Excel write on macOS.

    Args:
        head: its first bytes.
    """
    if b"\r" not in head or b"\n" in head:
        return False
    with open_data(path) as handle:
        return not any(b"\n" in chunk for chunk in iter(partial(handle.read, 1 << 20), b""))


def _wide_lines(handle: IO[bytes], path: Path, encoding: str, line_end: str) -> Iterator[str]:
    number = 0
    try:
        text = io.TextIOWrapper(handle, encoding, newline=line_end)
        for number, line in enumerate(text, 1):  # noqa: B007
            yield line
    except UnicodeError as error:
        raise _not_wide(path, f"the text after line {number}", encoding, error) from error


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        ConfigError: the file is not UTF-8, or UTF-16 or UTF-32 with a byte order mark.
    """
    with open_data(path) as handle:
        raw = handle.read()
    encoding = encoding_of(raw[:HEAD_BYTES], path)
    if encoding.startswith("utf-8"):
        raw = raw.removeprefix(codecs.BOM_UTF8)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise not_text(path, f"line {raw[: error.start].count(10) + 1}", error) from error
    try:
        return raw.decode(encoding)
    except UnicodeError as error:
        raise _not_wide(path, "the text", encoding, error) from error


def not_text(path: Path, where: str, error: UnicodeDecodeError) -> ConfigError:
    """Return the error for bytes that are not UTF-8, with the encoding that they may have."""
    raw = bytes(error.object)
    if len(raw) < _GUESSED_BYTES:
        with open_data(path) as handle:
            head = handle.read(_GUESSED_BYTES)
        raw = head[: head.rfind(b"\n") + 1] + raw  # more text than a single line
    return ConfigError(
        "{where} of `{path}` is not UTF-8 text (byte {object} at position {start})",
        code="not-utf8",
        fix=encoding_fix(raw, path),
        where=where,
        path=path,
        object=f"{error.object[error.start]:#04x}",
        start=error.start,
    )


def check_head(head: bytes, path: Path) -> None:
    """Check that the first bytes of a file are not text in another encoding.

    Raises:
        ConfigError: they are not UTF-8, but they are likely to be text in another encoding.
    """
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError as error:
        guesses = guess_encodings(head)
        is_known = any(each.is_likely and each.num_rated >= _MIN_RATED for each in guesses)
        if is_known and not is_mostly_utf8(head):
            line = head[: error.start].count(b"\n") + 1
            raise not_text(path, f"line {line}", error) from error


def encoding_fix(raw: bytes, path: Path) -> str:
    """Return how to convert a text that is not UTF-8: from the encoding that it may have, with a
    sample by which to judge the guess."""
    if is_mostly_utf8(raw):
        return "the rest is UTF-8, so these bytes are damaged: correct or delete them"
    read = f"`iconv -f {{}} -t utf-8 {path.name} > utf8-{path.name}`"
    if path.suffix.lower() in COMPRESSED_SUFFIXES:
        read = f"decompress the file, and `iconv -f {{}} -t utf-8 {path.stem} > utf8-{path.stem}`"
    guesses = guess_encodings(raw)
    likely = [guess for guess in guesses if guess.is_likely]
    if not likely:
        return f"convert the file with the encoding in which it was written: {read.format('NAME')}"
    first = likely[0]
    others = {guess.sample: guess.name for guess in reversed(likely[1:])}
    others.pop(first.sample, None)
    shown = [f"`{sample}` ({name})" for sample, name in [*others.items()][::-1][:_SHOWN_GUESSES]]
    text = f"if `{first.sample}` is right, its encoding is {first.name} (a guess):"
    text += f" {read.format(first.name)}"
    return text + (f"; other readings: {', '.join(shown)}" if shown else "")


def _not_wide(path: Path, where: str, encoding: str, error: UnicodeError) -> ConfigError:
    reason = getattr(error, "reason", str(error))
    return ConfigError(
        "{where} of `{path}` is not {upper} text ({reason})",
        code="invalid-encoding",
        fix="check the file; it may be truncated",
        where=where,
        path=path,
        upper=encoding.upper(),
        reason=reason,
    )
