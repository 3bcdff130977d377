"""Assign a model's tensors to pipeline stages, based on their names and sizes. Imports no torch."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

from paceline.core.errors import ConfigError
from paceline.core.formatting import counted
from paceline.models.json_config import JsonObject, first_number, language_fields

#: For models whose forward cannot be traced: modules that are registered before the blocks and used
#: after them, and the reverse.
_AFTER = re.compile(
    r"^(final_|ln_f|norm|.*_norm$|head|lm_head|score|classifier|project_out|proj_out|output)"
)
_BEFORE = re.compile(r"(embed|wte|wpe|position|shared)")
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


@dataclass(frozen=True)
class StagePlan:
    """The stages of a model.

    Args:
        blocks: for each stage, the range [first, beyond) of blocks that it runs.
        stages: parameter or buffer → the stages that hold it, in order; the first of them owns it.
            A tied weight is listed under all of its names.
        regions: module with parameters outside the blocks ("model.norm") → "before" or "after" the
            blocks, or "both".
    """

    blocks: tuple[tuple[int, int], ...]
    stages: Mapping[str, tuple[int, ...]]
    regions: Mapping[str, str]

    @property
    def num_stages(self) -> int:
        return len(self.blocks)

    def ranks_of(self, name: str, num_ranks: int) -> tuple[int, ...]:
        """Return the ranks of the pipeline that hold a parameter or buffer, in order."""
        return _ranks_of(self.stages[name], num_ranks)


@cache
def _ranks_of(stages: tuple[int, ...], num_ranks: int) -> tuple[int, ...]:
    return tuple(sorted({rank_of_stage(stage, num_ranks) for stage in stages}))


def divide(
    sizes: Mapping[str, int],
    blocks: Iterable[str],
    num_stages: int,
    aliases: Mapping[str, str] | None = None,
    buffers: Iterable[str] = (),
    phases: Mapping[str, Collection[str]] | None = None,
) -> StagePlan:
    """Assign the blocks to ``num_stages`` contiguous stages, and keep the largest stage as small as
    possible.

    Modules used before the blocks (embeddings) count to the first stage, those used after them
    (norm, head) to the last. The size of a stage is its number of elements, which is proportional
    to both memory (a fixed number of bytes per element) and compute (2 FLOPs per element and
    token).

    Args:
        sizes: elements of each parameter, in the model's order, tied weights once.
        blocks: dotted names, in the order in which they run.
        aliases: other name → first name of tied weights.
        buffers: the names of the buffers.
        phases: parameter outside the blocks → when a traced forward used it ("before", "after").
            Without it, names and the order of registration decide.

    Raises:
        ConfigError: there are fewer blocks with parameters than stages.
    """
    names, aliases = list(blocks), dict(aliases or {})
    block_index = {name: number for number, name in enumerate(names)}
    container = names[0].rpartition(".")[0].split(".") if names and "." in names[0] else []
    costs = [0] * len(names)
    outer = {"before": 0, "after": 0}
    regions: dict[str, str] = {}
    locations: dict[str, int | str] = {}  # number of the block, or the region
    after_block = False
    traced = _traced_regions(phases or {}, container)
    for name in [*sizes, *aliases]:
        unit = _unit(name, container)
        if unit in block_index:
            after_block = True
            locations[name] = block_index[unit]
            costs[block_index[unit]] += sizes.get(name, 0)
        else:
            if phases is None:
                regions.setdefault(unit, _region(unit, after_block))
            else:  # a module that the forward did not use is assigned to the last stage
                regions.setdefault(unit, traced.get(unit, "after"))
            locations[name] = regions[unit]
            for region in ("before", "after") if regions[unit] == "both" else (regions[unit],):
                # A tied weight takes memory and compute twice.
                outer[region] += sizes.get(name, sizes.get(aliases.get(name, ""), 0))
    with_parameters = sum(cost > 0 for cost in costs)
    if num_stages > with_parameters:
        raise too_many_stages(num_stages, with_parameters)
    ranges = _balance(tuple(costs), num_stages, outer["before"], outer["after"])
    stage_of_block = [
        stage for stage, (first, beyond) in enumerate(ranges) for _ in range(first, beyond)
    ]

    stages_of_region = {
        "before": {0},
        "after": {num_stages - 1},
        "both": {0, num_stages - 1},
    }

    def stages_of(location: int | str) -> set[int]:
        if isinstance(location, int):
            return {stage_of_block[location]}
        return stages_of_region[location]

    holders: dict[str, set[int]] = {}
    for name, location in locations.items():
        holders.setdefault(aliases.get(name, name), set()).update(stages_of(location))
    stages = {name: tuple(sorted(holders[aliases.get(name, name)])) for name in locations}
    for name in buffers:
        unit = _unit(name, container)
        location_of_unit = block_index.get(unit, regions.get(unit))
        if location_of_unit is None:  # such as rotary frequencies, which every stage computes
            stages[name] = tuple(range(num_stages))
        else:
            stages[name] = tuple(sorted(stages_of(location_of_unit)))
    return StagePlan(tuple(ranges), stages, regions)


def _unit(name: str, container: list[str]) -> str:
    """Return the block of a tensor, or else the largest module (or parameter) on the path to
    ``name`` that does not contain the blocks."""
    parts = name.split(".")
    common = 0
    while common < min(len(parts), len(container)) and parts[common] == container[common]:
        common += 1
    return ".".join(parts[: common + 1])


def _traced_regions(phases: Mapping[str, Collection[str]], container: list[str]) -> dict[str, str]:
    regions: dict[str, set[str]] = {}
    for name, used in phases.items():
        regions.setdefault(_unit(name, container), set()).update(
            phase for phase in used if phase in ("before", "after")
        )
    return {
        unit: "both" if len(used) == 2 else next(iter(used))
        for unit, used in regions.items()
        if used
    }


def _region(unit: str, after_block: bool) -> str:
    last = unit.rpartition(".")[2]
    if _BEFORE.search(last):
        return "before"
    return "after" if after_block or _AFTER.search(last) else "before"


def _balance(
    costs: tuple[int, ...], num_stages: int, before: int, after: int
) -> list[tuple[int, int]]:
    """Return contiguous ranges of blocks that minimize the largest cost of a stage, and then the
    sum of squares.

    This is a dynamic program. A boundary is considered only if it leaves a block with parameters to
    each of the later stages, so each of the num_stages × blocks states is solved once, and none is
    infeasible. There must be at least ``num_stages`` blocks with parameters.
    """
    num_blocks = len(costs)
    sums = [0, *accumulate(costs)]
    non_empty_from = [0] * (num_blocks + 1)  # blocks with parameters at or after a block
    for block in reversed(range(num_blocks)):
        non_empty_from[block] = non_empty_from[block + 1] + (costs[block] > 0)

    @cache
    def solve(stage: int, first: int) -> tuple[int, int, tuple[int, ...]]:
        """Return (largest, sum of squares, ends) for this and the later stages, if this one starts
        at block ``first``."""
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
            # of equal candidates the later boundary: an activation stays with its layer
            if best is None or candidate[:2] <= best[:2]:
                best = candidate
        assert best is not None
        return best

    return list(pairwise([0, *solve(0, 0)[2]]))


def rank_of_stage(stage: int, num_ranks: int) -> int:
    """Return the rank of a stage: rank r has the stages r, r + N, r + 2N … (Narayanan et al., 2021,
    section 2.2)."""
    return stage % num_ranks


def num_chunks(schedule: str, chunks: int) -> int:
    """Return the number of stages that each rank holds under a schedule."""
    return chunks if schedule in ("interleaved_1f1b", "zero_bubble") else 1


def check_sizes(config_json: JsonObject, pipeline: int, chunks: int = 1) -> None:
    """Check the number of layers in a Hugging Face ``config.json``, if it has one.

    Raises:
        ConfigError: there are more stages than layers.
    """
    layers = first_number(language_fields(config_json), *_LAYER_KEYS)
    if layers is not None and pipeline * chunks > layers:
        raise too_many_stages(pipeline * chunks, layers, pipeline, chunks)


def too_many_stages(
    stages: int, layers: int, pipeline: int | None = None, chunks: int = 1
) -> ConfigError:
    """Return the error for a pipeline with more stages than layers."""
    fix = f"set `parallel.pipeline: {max(1, layers // chunks)}`"
    if chunks > 1:
        fix += (
            f" with `stages_per_rank: {chunks}`, or a schedule with one stage per rank:"
            " `parallel.pipeline_schedule: 1f1b`"
        )
    needed = "the pipeline needs"
    if pipeline is not None:
        per_rank = f" with {counted(chunks, 'stage')} per rank" if chunks > 1 else ""
        needed = f"`parallel.pipeline: {pipeline}`{per_rank} needs"
    return ConfigError(
        "{needed} {stages:stage}, but the model has {layers:layer}",
        code="too-many-stages",
        allowed="at most {layers_2:stage} (ranks of the pipeline × stages per rank)",
        fix=fix,
        needed=needed,
        stages=stages,
        layers=layers,
        layers_2=max(layers, 1),
    )
