"""The table of what each strategy supports, in docs/strategies.md.

python -m paceline.parallel.support_table        # update it
"""

from collections.abc import Iterator
from pathlib import Path

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.capabilities import Capabilities, check_features, check_limits
from paceline.parallel.limits.shared import FOR_ALL
from paceline.parallel.registry import STRATEGIES

BEGIN, END = "<!-- support: begin -->\n", "<!-- support: end -->"
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

#: Columns whose reasons are the same for most strategies.
_FEATURES = [COLUMNS[key] for key in ("`compression`", "`all_reduce_algorithm: ring`", "`balance`")]


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


def table() -> str:
    """Return the table and the reasons, as Markdown."""
    lines = [
        "| | " + " | ".join(COLUMNS) + " | mixed devices |",
        "|---|" + "---|" * (len(COLUMNS) + 1),
    ]
    reasons: dict[str, None] = {}
    for name, mode, dims, parallel in rows():
        cells = []
        for settings in COLUMNS.values():
            reason = reason_against(mode, dims, parallel, settings)
            if reason is not None and settings not in _FEATURES:
                reasons[f"- {reason}."] = None
            cells.append("–" if reason else "yes")
        cells.append("yes" if STRATEGIES[mode].capabilities.mixed_devices else "–")
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    head = (
        "The reasons, as in the error messages (compression and `all_reduce_algorithm` need"
        " replicas whose"
        " gradients are summed in buckets):"
    )
    return "\n".join([*lines, "", head, "", *reasons, "", ""])


def updated(page: str) -> str:
    """Return the page with an updated table."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE = Path("docs/strategies.md")
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
