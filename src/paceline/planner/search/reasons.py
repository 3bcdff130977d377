"""Why a set-up was chosen and others were not, as text. Imports no torch."""

from paceline.core.files import human_bytes
from paceline.planner.search.search import Candidate, Objective

#: Parts of a step, by the names of their times.
PART_NAMES = {
    "products_s": "matrix products",
    "attention_s": "attention",
    "memory_s": "operations limited by memory",
    "launches_s": "launches",
    "exposed_s": "exchanges within layers",
    "idle_s": "idle pipeline stages",
    "traffic_s": "weights and gradients",
    "optimizer_s": "optimizer and fixed costs",
    "host_s": "copies to the host",
}
_SUPERLATIVES = {"time": "fastest", "memory": "smallest", "cost": "cheapest"}
_COMPARATIVES = {
    "time": ("slower", "faster"),
    "memory": ("more memory", "less memory"),
    "cost": ("more device time", "less device time"),
}
#: Differences below this share are not stated.
_SMALL = 0.0005


def reason_for(chosen: Candidate, count: int, memory_bytes: int, objective: Objective) -> str:
    """Return why a candidate was chosen among ``count`` layouts."""
    memory = f"{human_bytes(chosen.mode.total)} of {human_bytes(memory_bytes)} per rank"
    if count == 1:
        return f"{chosen.name} is the only possible mode that fits: {memory}"
    superlative = _SUPERLATIVES[objective]
    return f"{chosen.name} is the {superlative} that fits of {count} modes, by estimate: {memory}"


def comparison(
    other: Candidate, chosen: Candidate, objective: Objective, *, is_simpler: bool = True
) -> str:
    """Return how another set-up differs from the choice: ``zero2: 1.6 % slower, mostly by weights
    and gradients; 32.4 GiB per rank``.

    Args:
        is_simpler: whether the choice is simpler than what is as good or better.
    """
    less_simple = ", but less simple" if is_simpler else ""
    change = other.value(objective) / chosen.value(objective) - 1
    worse, better = _COMPARATIVES[objective]
    memory = f"{human_bytes(other.mode.total)} per rank"
    if abs(change) < _SMALL:
        difference = f"as good{less_simple}"
    else:
        difference = f"{abs(change):.1%} {worse if change > 0 else better}"
        part = _largest_part(other, chosen) if objective != "memory" and change > 0 else None
        difference += f", mostly by {part}" if part else ""
        difference += "" if change > 0 else less_simple
    return f"{other.name}: {difference}; {memory}"


def _largest_part(other: Candidate, chosen: Candidate) -> str | None:
    """Return the part of a step that takes more time per sample than in the chosen set-up."""
    first, second = (
        None if each.mode.time is None else each.mode.time.parts_s for each in (other, chosen)
    )
    if first is None or second is None:
        return None
    batches = other.mode.global_batch_size, chosen.mode.global_batch_size
    differences = {
        name: first[name] / batches[0] - second[name] / batches[1] for name in PART_NAMES
    }
    largest = max(differences, key=lambda name: differences[name])
    return PART_NAMES[largest] if differences[largest] > 0 else None
