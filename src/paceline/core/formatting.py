"""A whole number of things shared among so many: as evenly as it can be, in one fixed order."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from paceline.core.events import DataFigures, StepEvent
from paceline.core.files import human_bytes


def edges(total: int, parts: int) -> list[int]:
    """Where each of ``parts`` consecutive shares of ``range(total)`` begins, and the end: ``8, 3``
    → ``[0, 3, 6, 8]``.

    Sizes differ by at most one, and the larger ones are spread: any ``k`` shares in a row that
    begin at a multiple of ``k`` come, where ``k`` divides ``parts``, to what ``edges(total, parts
    // k)`` says.
    """
    return [-(-total * part // parts) for part in range(parts + 1)]


def shares(total: int, parts: int) -> list[int]:
    """The sizes: ``8, 3`` → ``[3, 3, 2]``."""
    return [end - start for start, end in pairwise(edges(total, parts))]


def shares_text(total: int, parts: int) -> str:
    """For a person: ``3+3+2``; of many parts ``2 × 3 + 62 × 2``."""
    sizes = sorted(shares(total, parts), reverse=True)
    if parts <= 8:
        return "+".join(map(str, sizes))
    return " + ".join(f"{sizes.count(size)} × {size}" for size in sorted(set(sizes), reverse=True))


def weighted_shares(total: int, weights: Sequence[float]) -> list[int]:
    """Split ``total`` in proportion to ``weights`` by the largest-remainder method, at least 1
    each.

    ``4, [3, 1]`` → ``[3, 1]``. Ties go to the lower index, so the result is the same on every rank.

    Args:
        total: number of items, at least ``len(weights)``.
        weights: positive numbers.
    """
    sum_of_weights = sum(weights)
    quotas = [total * weight / sum_of_weights for weight in weights]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(
        range(len(weights)), key=lambda index: (counts[index] - quotas[index], index)
    )
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    while 0 in counts:
        largest = max(range(len(counts)), key=lambda index: (counts[index], -index))
        counts[largest] -= 1
        counts[counts.index(0)] += 1
    return counts


def counts_text(counts: Sequence[int]) -> str:
    """Return ``3+1``, in the order of the ranks; runs of equal numbers are shortened if there are
    more than eight: ``8 × 3 + 8 × 1``."""
    if len(counts) <= 8:
        return "+".join(map(str, counts))
    runs: list[list[int]] = []
    for count in counts:
        if runs and runs[-1][1] == count:
            runs[-1][0] += 1
        else:
            runs.append([1, count])
    return " + ".join(f"{length} × {count}" for length, count in runs)


UNKNOWN = "–"


def number(value: Any) -> float | None:
    """A figure of an event as a float; None where it is unknown. The strings "nan", "inf", "-inf"
    become those floats."""
    if value is None or isinstance(value, bool | dict | list):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def finite(value: Any) -> float | None:
    """As :func:`number`, but None for NaN and the infinities too."""
    figure = number(value)
    return figure if figure is not None and math.isfinite(figure) else None


def loss(value: Any) -> str:
    """Return at least four digits: ``12.35``, ``1.2346``, ``0.01235``, ``1.2e-05``, ``nan``."""
    figure = number(value)
    if figure is None:
        return UNKNOWN
    if not math.isfinite(figure):
        return str(figure)
    size = abs(figure)
    if size and (size < 1e-3 or size >= 1e5):
        return f"{figure:.2e}"
    return f"{figure:.2f}" if size >= 10 else f"{figure:.4f}"


def rate(value: Any) -> str:
    """A learning rate, short: ``1e-4``, ``2.5e-05`` → ``2.5e-5``."""
    figure = number(value)
    if figure is None:
        return UNKNOWN
    if figure == 0 or 1e-3 < abs(figure) < 1e3 or not math.isfinite(figure):
        return f"{figure:.3g}"
    digits, exponent = f"{figure:.2e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"


def count(value: Any) -> str:
    """``12,345``."""
    figure = finite(value)
    if figure is None:
        return UNKNOWN
    return f"{figure:,.0f}" if figure == int(figure) else f"{figure:,.3g}"


def short_count(value: Any) -> str:
    """``950``, ``12.3k``, ``4.57M``: for a live line."""
    figure = finite(value)
    if figure is None:
        return UNKNOWN
    for unit in ("", "k", "M", "B"):
        if abs(figure) < 999.5:
            return f"{figure:.3g}{unit}"
        figure /= 1000
    return f"{figure:.3g}T"


def duration(value: Any) -> str:
    """Seconds as ``0.42 s``, ``12.3 s``, ``2 min 05 s``, ``3 h 07 min``, ``2 d 4 h``."""
    seconds = finite(value)
    if seconds is None:
        return UNKNOWN
    if seconds < 59.95:
        return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def short_duration(value: Any) -> str:
    """Seconds of a step or a message: ``0.12 ms``, ``12 ms``, ``2.8 s``; from a minute on as
    :func:`duration`."""
    seconds = finite(value)
    if seconds is None:
        return UNKNOWN
    if abs(seconds) >= 59.95:
        return duration(seconds)
    figure, unit = (seconds, "s") if abs(seconds) >= 0.9995 else (seconds * 1e3, "ms")
    return f"{figure:.0f} {unit}" if abs(figure) >= 9.95 else f"{figure:.2g} {unit}"


def bit_rate(bytes_a_second: Any) -> str:
    """``94 Mbit/s``."""
    figure = finite(bytes_a_second)
    if figure is None:
        return UNKNOWN
    bits = 8 * figure
    if bits >= 1e9:
        scaled, unit = bits / 1e9, "Gbit/s"
    elif bits >= 1e6:
        scaled, unit = bits / 1e6, "Mbit/s"
    else:
        scaled, unit = bits / 1e3, "kbit/s"
    return f"{scaled:.0f} {unit}" if scaled >= 9.95 else f"{scaled:.2g} {unit}"


def clock(value: Any) -> str:
    """Seconds as ``1:05`` or ``3:07:09``: for a live line."""
    seconds = finite(value)
    if seconds is None:
        return "--:--"
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def size(value: Any) -> str:
    """Bytes as ``1.5 GiB``."""
    figure = finite(value)
    return UNKNOWN if figure is None else human_bytes(figure)


def ranks(world_size: Any) -> str:
    """``1 rank``, ``4 ranks``."""
    figure = finite(world_size)
    if figure is None:
        return UNKNOWN
    return "1 rank" if figure == 1 else f"{figure:.0f} ranks"


def rank_names(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 0, 2``."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def clean(text: Any) -> str:
    """``text`` without control characters: what a config or a data set holds must not steer a
    terminal."""
    return "".join(
        char if char.isprintable() or char == "\n" else " " if char == "\t" else "\ufffd"
        for char in str(text)
    )


def fullest(memory_bytes: Any) -> float | None:
    """Memory of the fullest rank, of a ``memory_bytes`` list (or a single figure)."""
    values = memory_bytes if isinstance(memory_bytes, list | tuple) else [memory_bytes]
    known = [figure for value in values if (figure := finite(value)) is not None]
    return max(known, default=None)


def throughput(step: StepEvent, global_batch_size: Any = None) -> tuple[float | None, str]:
    """Of a ``step`` event: tokens a second, or samples a second where samples have no tokens. With
    the unit."""
    seconds, tokens, samples = (
        finite(step.get("step_time_s")),
        finite(step.get("tokens")),
        finite(step.get("samples")),
    )
    if samples is None:
        samples = finite(global_batch_size)
    what, unit = (tokens, "tokens/s") if tokens is not None else (samples, "samples/s")
    return (what / seconds if what is not None and seconds else None), unit


def data_line(data: DataFigures) -> str:
    """The counts of ``data``: ``90 read, 85 kept, 4 truncated, 5 dropped (3 empty, 2 too long), 7
    turns without loss``."""
    dropped = data.get("dropped") or {}
    reasons = dropped if isinstance(dropped, dict) else {}
    total = sum(reasons.values()) if isinstance(dropped, dict) else dropped
    parts = [f"{count(data.get('read'))} read", f"{count(data.get('kept'))} kept"]
    if data.get("truncated") is not None:
        parts.append(f"{count(data['truncated'])} truncated")
    named = ", ".join(
        f"{count(num_rows)} {clean(reason)}" for reason, num_rows in reasons.items() if num_rows
    )
    parts.append(f"{count(total)} dropped" + (f" ({named})" if named else ""))
    if data.get("excluded_turns"):
        parts.append(f"{count(data['excluded_turns'])} turns without loss")
    return ", ".join(parts)


def counted(number: int, noun: str) -> str:
    """``1, "sample"`` → ``1 sample``; ``2000, "sample"`` → ``2,000 samples``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def printable(text: str, max_chars: int = 60) -> str:
    """``text`` so that it does nothing to the terminal: characters that do not print are escaped,
    and a long text is cut."""
    shown = "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text[:max_chars]
    )
    return shown + ("…" if len(text) > max_chars else "")
