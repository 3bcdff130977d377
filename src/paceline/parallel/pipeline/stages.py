"""Which stage holds what: from names and sizes alone. No torch here: the launcher and the plan ask
too."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

from paceline.core.errors import ConfigError
from paceline.core.formatting import counted
from paceline.models.json_config import JsonObject, first_number, language_fields

#: For models of which no forward can be traced. Modules registered before the blocks and used after
#: them, and the reverse: order of registration alone would misplace them.
_AFTER = re.compile(
    r"^(final_|ln_f|norm|.*_norm$|head|lm_head|score|classifier|project_out|proj_out|output)"
)
_BEFORE = re.compile(r"(embed|wte|wpe|position|shared)")
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


@dataclass(frozen=True)
class StagePlan:
    """A model dealt to stages.

    Args:
        blocks: for each stage, the range [first, beyond) of blocks that it runs.
        stages: parameter or buffer → the stages that hold it, in order; the first of them owns it.
            All names of a tied weight.
        regions: module with parameters outside the blocks ("model.norm") → "before" or "after" the
            blocks, or "both".
    """

    blocks: tuple[tuple[int, int], ...]
    stages: Mapping[str, tuple[int, ...]]
    regions: Mapping[str, str]

    @property
    def num_stages(self) -> int:
        return len(self.blocks)

    def ranks_of(self, name: str, num_ranks: int) -> list[int]:
        """The ranks of the pipeline that hold a parameter or buffer, in order."""
        return sorted({rank_of_stage(stage, num_ranks) for stage in self.stages[name]})


def divide(
    sizes: Mapping[str, int],
    blocks: Iterable[str],
    num_stages: int,
    aliases: Mapping[str, str] | None = None,
    buffers: Iterable[str] = (),
    phases: Mapping[str, Collection[str]] | None = None,
) -> StagePlan:
    """Deal the blocks to ``num_stages`` contiguous stages so that the largest has as few elements
    as can be; what is used before the blocks (embeddings) counts to the first stage, what is used
    after them (norm, head) to the last.

    Elements stand for both memory (state is a fixed number of bytes an element) and compute (2
    FLOPs an element and token).

    Args:
        sizes: elements of each parameter, in the model's order, tied weights once.
        blocks: dotted names, in the order in which they run.
        aliases: further name → first name.
        buffers: their names.
        phases: parameter outside the blocks → when a traced forward used it ("before", "after").
            Without it, names and the order of registration decide.

    Raises:
        ConfigError: fewer blocks with parameters than stages.
    """
    names, aliases = list(blocks), dict(aliases or {})
    place = {name: number for number, name in enumerate(names)}
    container = names[0].rpartition(".")[0].split(".") if names and "." in names[0] else []
    costs = [0] * len(names)
    outer = {"before": 0, "after": 0}
    regions: dict[str, str] = {}
    where: dict[str, int | str] = {}  # number of the block, or the region
    met_block = False
    traced = _traced_regions(phases or {}, container)
    for name in [*sizes, *aliases]:
        unit = _unit(name, container)
        found: int | str
        if unit in place:
            met_block, found = True, place[unit]
            costs[place[unit]] += sizes.get(name, 0)
        else:
            if phases is None:
                regions.setdefault(unit, _region(unit, met_block))
            else:  # a module that the forward did not use stays with the last stage
                regions.setdefault(unit, traced.get(unit, "after"))
            found = regions[unit]
            for region in ("before", "after") if found == "both" else (found,):
                # A tied weight is held, and computed with, twice.
                outer[region] += sizes.get(name, sizes.get(aliases.get(name, ""), 0))
        where[name] = found
    with_parameters = sum(cost > 0 for cost in costs)
    if num_stages > with_parameters:
        raise too_many_stages(num_stages, with_parameters)
    ranges = _balance(tuple(costs), num_stages, outer["before"], outer["after"])
    stage_of_block = [
        stage for stage, (first, beyond) in enumerate(ranges) for _ in range(first, beyond)
    ]

    def stages_of(found: int | str) -> tuple[int, ...]:
        if isinstance(found, int):
            return (stage_of_block[found],)
        return {"before": (0,), "after": (num_stages - 1,), "both": (0, num_stages - 1)}[found]

    held: dict[str, set[int]] = {}
    for name, found in where.items():
        held.setdefault(aliases.get(name, name), set()).update(stages_of(found))
    stages = {name: tuple(sorted(held[aliases.get(name, name)])) for name in where}
    for name in buffers:
        unit = _unit(name, container)
        spot = place.get(unit, regions.get(unit))
        # rotary frequencies and their like: every stage computes them
        stages[name] = (
            tuple(range(num_stages)) if spot is None else tuple(sorted(set(stages_of(spot))))
        )
    return StagePlan(tuple(ranges), stages, regions)


def _unit(name: str, container: list[str]) -> str:
    """The block, or else the largest module (or parameter) on the way to ``name`` that does not
    hold the blocks."""
    parts = name.split(".")
    common = 0
    while common < min(len(parts), len(container)) and parts[common] == container[common]:
        common += 1
    return ".".join(parts[: common + 1])


def _traced_regions(phases: Mapping[str, Collection[str]], container: list[str]) -> dict[str, str]:
    seen: dict[str, set[str]] = {}
    for name, result in phases.items():
        seen.setdefault(_unit(name, container), set()).update(
            phase for phase in result if phase in ("before", "after")
        )
    return {
        unit: "both" if len(result) == 2 else next(iter(result))
        for unit, result in seen.items()
        if result
    }


def _region(unit: str, met_block: bool) -> str:
    last = unit.rpartition(".")[2]
    if _BEFORE.search(last):
        return "before"
    return "after" if met_block or _AFTER.search(last) else "before"


def _balance(
    costs: tuple[int, ...], num_stages: int, before: int, after: int
) -> list[tuple[int, int]]:
    """Contiguous ranges of blocks with the least maximum (and then the least sum of squares) of a
    stage's cost.

    A dynamic program. A cut is considered only if it leaves a
    block with parameters to each of the later stages, so each of the num_stages × blocks states is
    solved once, and none is infeasible. The caller has checked that there are at least
    ``num_stages`` blocks with parameters.
    """
    num_blocks = len(costs)
    sums = [0, *accumulate(costs)]
    non_empty_from = [0] * (num_blocks + 1)  # blocks with parameters at or after a block
    for block in reversed(range(num_blocks)):
        non_empty_from[block] = non_empty_from[block + 1] + (costs[block] > 0)

    @cache
    def solve(stage: int, first: int) -> tuple[int, int, tuple[int, ...]]:
        """(largest, sum of squares, ends) for this and the later stages, if this one starts at
        block ``first``."""
        extra = before if stage == 0 else 0
        if stage == num_stages - 1:
            cost = sums[-1] - sums[first] + extra + after
            return cost, cost * cost, (num_blocks,)
        best: tuple[int, int, tuple[int, ...]] | None = None
        for end in range(first + 1, num_blocks):
            if non_empty_from[end] < num_stages - 1 - stage:
                break
            if sums[end] == sums[first]:
                continue  # a stage without parameters
            cost = sums[end] - sums[first] + extra
            if best is not None and cost > best[0]:
                break
            largest, squares, ends = solve(stage + 1, end)
            candidate = (max(cost, largest), cost * cost + squares, (end, *ends))
            # of equals the later cut: an activation stays with its layer
            if best is None or candidate[:2] <= best[:2]:
                best = candidate
        assert best is not None
        return best

    return list(pairwise([0, *solve(0, 0)[2]]))


def rank_of_stage(stage: int, num_ranks: int) -> int:
    """Stages go round the ranks: rank r has the stages r, r + N, r + 2N … (Narayanan et al., 2021,
    section 2.2)."""
    return stage % num_ranks


def num_chunks(schedule: str, chunks: int) -> int:
    """Stages that each rank holds under a schedule."""
    return chunks if schedule in ("interleaved_1f1b", "zero_bubble") else 1


def check_sizes(config_json: JsonObject, pipeline: int, chunks: int = 1) -> None:
    """Before anything is loaded: does a Hugging Face ``config.json`` name enough layers? Says
    nothing where it names none.

    Raises:
        ConfigError: more stages than layers.
    """
    layers = first_number(language_fields(config_json), *_LAYER_KEYS)
    if layers is not None and pipeline * chunks > layers:
        raise too_many_stages(pipeline * chunks, layers, pipeline, chunks)


def too_many_stages(
    stages: int, layers: int, pipeline: int | None = None, chunks: int = 1
) -> ConfigError:
    if pipeline is None:
        what = f"the pipeline wants {counted(stages, 'stage')}"
    else:
        each = f" of {counted(chunks, 'stage')}" if chunks > 1 else ""
        what = f"`parallel.pipeline: {pipeline}`{each} makes {counted(stages, 'stage')}"
    fit = f"`parallel.pipeline: {max(1, layers // chunks)}`" + (
        f" with `stages_per_rank: {chunks}`" if chunks > 1 else ""
    )
    return ConfigError(
        f"{what}, and the model has {counted(layers, 'layer')} to deal out",
        allowed=(
            f"at most {counted(max(layers, 1), 'stage')} (ranks of the pipeline × stages a rank)"
        ),
        fix=f"set {fit}"
        + (
            ", or a schedule of one stage a rank: `parallel.pipeline_schedule: 1f1b`"
            if chunks > 1
            else ""
        ),
    )
