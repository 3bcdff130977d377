"""Why a set-up was chosen and others were not, as text. Imports no torch."""

from paceline.core.files import human_bytes
from paceline.core.texts import UserText
from paceline.planner.estimate import ModeEstimate
from paceline.planner.search.search import EQUAL, Candidate, Objective, SearchResult
from paceline.planner.search.trials import settings_text

#: Parts of a step, by the names of their times.
PART_NAMES = {
    "products_s": UserText("matrix products", code="part-products"),
    "attention_s": UserText("attention", code="part-attention"),
    "memory_s": UserText("operations limited by memory", code="part-memory"),
    "launches_s": UserText("launches", code="part-launches"),
    "exposed_s": UserText("exchanges within layers", code="part-exchanges"),
    "idle_s": UserText("idle pipeline stages", code="part-idle-stages"),
    "traffic_s": UserText("weights and gradients", code="part-traffic"),
    "optimizer_s": UserText("optimizer and fixed costs", code="part-optimizer"),
    "host_s": UserText("copies to the host", code="part-host-copies"),
}
_SUPERLATIVES = {"time": "fastest", "memory": "smallest", "cost": "cheapest"}
#: Differences below this share are not stated.
_SMALL = 0.0005


def reason_for(
    chosen: Candidate, searched: SearchResult, memory_bytes: int, objective: Objective
) -> UserText:
    """Return why a candidate was chosen among the results of a search."""
    needed, memory = human_bytes(chosen.mode.total), human_bytes(memory_bytes)
    count, superlative = searched.count, _SUPERLATIVES[objective]
    if count == 1:
        return UserText(
            "{name} is the only possible mode that fits: {needed} of {memory} per rank",
            code="only-mode",
            name=chosen.name,
            needed=needed,
            memory=memory,
        )
    if chosen.value(objective) <= min(each.value(objective) for each in searched.fitting):
        return UserText(
            "{name} is the {superlative} that fits of {count} modes, by estimate: {needed} of"
            " {memory} per rank",
            code="fastest-mode"
            if objective == "time"
            else "smallest-mode"
            if objective == "memory"
            else "cheapest-mode",
            name=chosen.name,
            superlative=superlative,
            count=count,
            needed=needed,
            memory=memory,
        )
    return UserText(
        "{name} is chosen: the {preferred} within {share} of the {superlative} that fits of"
        " {count} modes, by estimate: {needed} of {memory} per rank",
        code="preferred-mode",
        name=chosen.name,
        preferred="fastest" if objective == "memory" else "simplest",
        share=f"{1 - EQUAL:.0%}",
        superlative=superlative,
        count=count,
        needed=needed,
        memory=memory,
    )


def next_text(other: Candidate, chosen: Candidate, objective: Objective) -> str:
    """Return the remark about a runner-up."""
    change = other.value(objective) / chosen.value(objective) - 1
    percent = f"{abs(change):.1%}" if abs(change) >= _SMALL else ""
    worse, better = (percent, "") if change > 0 else ("", percent)
    return UserText(
        "next: {comparison}",
        code="next-by-time"
        if objective == "time"
        else "next-by-memory"
        if objective == "memory"
        else "next-by-cost",
        comparison=comparison(other, chosen, objective),
        name=other.name,
        worse=worse,
        better=better,
        needed=human_bytes(other.mode.total),
    )


def comparison(
    other: Candidate, chosen: Candidate, objective: Objective, *, is_simpler: bool = True
) -> UserText:
    """Return how another set-up differs from the choice: ``zero2: 1.6 % slower, mostly by weights
    and gradients; 32.4 GiB per rank``.

    Args:
        is_simpler: whether the choice is simpler than what is as good or better.
    """
    change = other.value(objective) / chosen.value(objective) - 1
    part = _largest_part(other, chosen) if objective != "memory" else None
    difference = describe_change(change, part, objective, is_simpler=is_simpler)
    return UserText(
        "{name}: {difference}; {needed} per rank",
        code="mode-compared",
        name=other.name,
        difference=difference,
        needed=human_bytes(other.mode.total),
    )


def describe_change(
    change: float, part: str | None, objective: Objective = "time", *, is_simpler: bool = True
) -> UserText:
    """Return a relative change of what the objective minimizes as text.

    Args:
        part: what it is mostly due to if it is positive.
        is_simpler: whether the choice is simpler than what is as good or better.
    """
    suffix = ", but less simple" if is_simpler else ""
    if abs(change) < _SMALL:
        return UserText(
            "as good{suffix}",
            code="as-good-but-less-simple" if is_simpler else "as-good",
            suffix=suffix,
        )
    share = f"{abs(change):.1%}"
    if change < 0:
        match objective:
            case "time":
                return UserText("{share} faster{suffix}", code="faster", share=share, suffix=suffix)
            case "memory":
                return UserText(
                    "{share} less memory{suffix}", code="less-memory", share=share, suffix=suffix
                )
            case "cost":
                return UserText(
                    "{share} less device time{suffix}",
                    code="less-device-time",
                    share=share,
                    suffix=suffix,
                )
    cause, part = f", mostly by {part}" if part else "", part or ""
    match objective:
        case "time":
            return UserText(
                "{share} slower{cause}", code="slower", share=share, cause=cause, part=part
            )
        case "memory":
            return UserText(
                "{share} more memory{cause}",
                code="more-memory",
                share=share,
                cause=cause,
                part=part,
            )
        case "cost":
            return UserText(
                "{share} more device time{cause}",
                code="more-device-time",
                share=share,
                cause=cause,
                part=part,
            )


def bucket_reason(chosen: Candidate, default: ModeEstimate) -> str:
    """Return why the size of the buckets was chosen.

    Args:
        default: the estimate with the default size.
    """
    before_s, seconds = default.step_time_s, chosen.mode.step_time_s
    assert before_s is not None
    assert seconds is not None
    [size_mib] = chosen.buckets.values()
    return UserText(
        "{settings}: buckets of {size_mib} MiB save {saved_ms} ms per step on the measured link",
        code="bucket-size-chosen",
        settings=settings_text(chosen.buckets),
        size_mib=f"{size_mib:g}",
        saved_ms=f"{1000 * (before_s - seconds):.2g}",
    )


def _largest_part(other: Candidate, chosen: Candidate) -> UserText | None:
    """Return the part of a step that takes more time per sample than in the chosen set-up."""
    first, second = (
        None if each.mode.time is None else each.mode.time.parts_s for each in (other, chosen)
    )
    if first is None or second is None:
        return None
    batches = other.mode.global_batch_size, chosen.mode.global_batch_size
    return slower_part(first, second, batches)


def slower_part(
    parts_s: dict[str, float], chosen_s: dict[str, float], batches: tuple[float, float]
) -> UserText | None:
    """Return the part of a step that takes more time per sample than in the chosen set-up.

    Args:
        batches: samples of a step of both.
    """
    differences = {
        name: parts_s[name] / batches[0] - chosen_s[name] / batches[1] for name in PART_NAMES
    }
    largest = max(differences, key=lambda name: differences[name])
    return PART_NAMES[largest] if differences[largest] > 0 else None
