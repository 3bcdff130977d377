"""The tables in docs/strategies.md: what each strategy supports, and which axes combine.

python -m paceline.parallel.support_table        # update it
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from paceline.config.schema import Config
from paceline.config.schema.parallel import Parallel
from paceline.core.errors import ConfigError
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.capabilities import Capabilities, check_features, check_limits
from paceline.parallel.limits.shared import FOR_ALL
from paceline.parallel.registry import STRATEGIES, layout

BEGIN, END = "<!-- support: begin -->\n", "<!-- support: end -->"
AXES_BEGIN, AXES_END = "<!-- axes: begin -->\n", "<!-- axes: end -->"
#: Axes of the second table.
AXES = ("data", "shard", "context", "tensor", "pipeline", "expert")
#: Sections of a config.
Settings = dict[str, dict[str, str | bool]]
#: Column → the settings that are checked.
COLUMNS: dict[str, Settings] = {
    "`fp16-mixed`": {"train_args": {"precision": "fp16-mixed"}},
    "recompute": {"train_args": {"gradient_checkpointing": "full"}},
    "`adagrad`": {"train_args": {"optim": "adagrad"}},
    "`adafactor`": {"train_args": {"optim": "adafactor"}},
    "`muon`": {"train_args": {"optim": "muon"}},
    "`lion`": {"train_args": {"optim": "lion"}},
    "8-bit": {"train_args": {"optim": "adamw_8bit"}},
    "`schedule_free_adamw`": {"train_args": {"optim": "schedule_free_adamw"}},
    "`cpu_offload: optimizer`": {"parallel": {"cpu_offload": "optimizer"}},
    "`cpu_offload: all`": {"parallel": {"cpu_offload": "all"}},
    "`cpu_offload: activations`": {"parallel": {"cpu_offload": "activations"}},
    "`evaluation.mode: rank0`": {"evaluation": {"mode": "rank0"}},
    "`compression`": {"compression": {"method": "bf16"}},
    "`all_reduce_algorithm: ring`": {"parallel": {"all_reduce_algorithm": "ring"}},
    "`balance`": {"parallel": {"balance": "speed"}},
    "`rollback_on_loss_spike`": {"recovery": {"rollback_on_loss_spike": True}},
}
#: A reason that depends on the mode.
_OF_MODE = re.compile(r"(.+ is not supported with) `parallel\.mode: (\w+)`(?: \([^)]*\))?: (.+)")


def rows() -> Iterator[tuple[str, str, ParallelDims, dict[str, int]]]:
    """Yield the name of a row, its mode, its dimensions (two ranks on the main one) and its
    settings."""
    for name, spec in STRATEGIES.items():
        if name == "hybrid":
            continue
        dims = ParallelDims() if name == "single" else ParallelDims(**{spec.main_dim: 2})
        if name == "deepspeed":
            for stage in (1, 2, 3):
                yield f"deepspeed-{stage}", name, dims, {"deepspeed_stage": stage}
        else:
            yield name, name, dims, {}
    yield "expert", "hybrid", ParallelDims(data=2, expert=2), {"expert": 2}


def reason_against(
    mode: str, dims: ParallelDims, parallel: dict[str, int], settings: Settings
) -> str | None:
    """Return why the strategy does not support the settings; None if it does."""
    section = {"mode": mode, **parallel, **settings.get("parallel", {})}
    task = "recommend" if mode == "parameter_server" else "sft"
    config = Config.model_validate(
        {"model": "m", "dataset": "d", "task": task, **settings, "parallel": section}
    )
    capabilities = STRATEGIES[mode].capabilities
    try:
        check_limits(mode, Capabilities(limits=FOR_ALL), config, dims)
        check_limits(mode, capabilities, config, dims)
        check_features(mode, capabilities, config, dims)
    except ConfigError as error:
        return error.what
    return None


def pair_sizes(first: str, second: str) -> dict[str, int]:
    """Return the sizes of two axes on four ranks. Experts are divided among ranks of the other
    axis, or of the axis data."""
    if second != "expert":
        return {first: 2, second: 2}
    if first in ("data", "shard", "context"):
        return {first: 4, "expert": 2}
    return {"data": 2, first: 2, "expert": 2}


def reason_against_axes(sizes: dict[str, int]) -> str | None:
    """Return why four ranks do not support sizes of axes; None if they do."""
    try:
        dims = layout(Parallel(**sizes), 4).axes
    except ConfigError as error:
        return error.what
    return reason_against("hybrid", dims, sizes, {})


def axes_table() -> str:
    """Return the table of pairs of axes and the reasons, as Markdown."""
    lines = ["| | " + " | ".join(f"`{axis}`" for axis in AXES[1:]) + " |", "|---|" + "---|" * 5]
    reasons: dict[str, None] = {}
    for row, first in enumerate(AXES[:-1]):
        cells = [""] * row
        for second in AXES[row + 1 :]:
            reason = reason_against_axes(pair_sizes(first, second))
            if reason is not None:
                reasons[f"- {reason}."] = None
            cells.append("–" if reason else "yes")
        lines.append(f"| `{first}` | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *reasons, "", ""])


def table() -> str:
    """Return the table and the reasons, as Markdown."""
    lines = [
        "| | " + " | ".join(COLUMNS) + " | mixed devices |",
        "|---|" + "---|" * (len(COLUMNS) + 1),
    ]
    reasons: list[str] = []
    for name, mode, dims, parallel in rows():
        cells = []
        for settings in COLUMNS.values():
            reason = reason_against(mode, dims, parallel, settings)
            if reason is not None:
                reasons.append(reason)
            cells.append("–" if reason else "yes")
        cells.append("yes" if STRATEGIES[mode].capabilities.mixed_devices else "–")
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    head = "The reasons, as in the error messages, with the values of `parallel.mode`:"
    return "\n".join([*lines, "", head, "", *_reason_lines(reasons), "", ""])


def _reason_lines(reasons: Iterable[str]) -> list[str]:
    """Return reasons as a list in Markdown. One item stands for all modes with a reason."""
    modes: dict[tuple[str, str], dict[str, None]] = {}
    for reason in reasons:
        setting, mode, why = _parts(reason)
        modes.setdefault((setting, why), {})[mode] = None
    return [
        f"- {setting} {', '.join(f'`{mode}`' for mode in names)}: {why}."
        if "" not in names
        else f"- {setting}."
        for (setting, why), names in modes.items()
    ]


def _parts(reason: str) -> tuple[str, str, str]:
    """Return a reason as the setting, the mode and why; a reason that does not depend on the mode
    is the first of them."""
    match = _OF_MODE.fullmatch(reason)
    return (reason, "", "") if match is None else (match[1], match[2], match[3])


def is_printed(reason: str, page: str) -> bool:
    """Return whether the page has a reason."""
    setting, mode, why = _parts(reason)
    if not mode:
        return f"- {setting}.\n" in page
    lines = (line for line in page.splitlines() if line.startswith(f"- {setting} `"))
    return any(f"`{mode}`" in line.removesuffix(f": {why}.") for line in lines
               if line.endswith(f": {why}."))  # fmt: skip


def updated(page: str) -> str:
    """Return the page with updated tables."""
    for begin, end, content in ((BEGIN, END, table()), (AXES_BEGIN, AXES_END, axes_table())):
        before, _, rest = page.partition(begin)
        page = before + begin + content + end + rest.partition(end)[2]
    return page


if __name__ == "__main__":
    PAGE = Path("docs/strategies.md")
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
