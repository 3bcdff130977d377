"""Print what `paceline plan` predicts for the recipes on their hardware, as a Markdown table.

`python examples/recipes/predict.py --write docs/how-to/recipes.md` replaces the table in the guide.
"""

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import paceline
from paceline.core import formatting

FOLDER = Path(__file__).parent
BEGIN, END = "<!-- predicted: begin -->", "<!-- predicted: end -->"


@dataclass(frozen=True)
class Hardware:
    """The devices of a recipe.

    Args:
        device: name in the planner's table; None for the ranks of a CPU, whose time per step is not
            in the table because it depends on the CPU.
        config: another config that the recipe trains.
        overrides: of a config that reads data which is not there, or of another config.
    """

    count: int
    device: str | None = None
    config: str | None = None
    overrides: Mapping[str, str | int] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return f"{self.count} × {self.device or 'CPU rank'}"


HARDWARE = {
    "qwen-7b-lora-4xa10": Hardware(4, "A10"),
    "full-1.5b-24gb": Hardware(1, "RTX-4090"),
    "lora-70b-8x80gb": Hardware(8, "A100-80GB"),
    "two-boxes-gigabit": Hardware(2, "RTX-4090"),
    "cpu-laptop": Hardware(2),
    "image-classifier": Hardware(1, "RTX-4090", overrides={"dataset": "builtin:digits"}),
    "click-model-large-table": Hardware(2, overrides={"dataset": "clicks.csv"}),
    "continued-pretraining": Hardware(8, "H100-SXM"),
    "slurm-lora-ranks": Hardware(
        1,
        "L40S",
        "qwen-7b-lora-4xa10",
        {"parallel.mode": "single", "parallel.num_gpus": 1, "lora.rank": 64},
    ),
}


def table() -> str:
    """Return the table."""
    lines = [
        "| recipe | hardware | strategy | memory per device | step | samples/s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    with tempfile.TemporaryDirectory() as folder:
        write_clicks(Path(folder) / "clicks.csv")
        rows = [row(name, hardware, Path(folder)) for name, hardware in HARDWARE.items()]
    return "\n".join([*lines, *rows])


def write_clicks(path: Path, num_rows: int = 200) -> None:
    """Write a click log with the columns that the recipe reads."""
    rows = [
        f"{number % 2},{20 + number % 50},{number % 10}.5,{number},{number % 17}"
        for number in range(num_rows)
    ]
    path.write_text("\n".join(["click,age,price,user,item", *rows, ""]), encoding="utf-8")


def row(name: str, hardware: Hardware, data: Path) -> str:
    """Return the row of a recipe. ``data``: folder of the generated data."""
    overrides = dict(hardware.overrides)
    if overrides.get("dataset") == "clicks.csv":
        overrides["dataset"] = str(data / "clicks.csv")
    path = FOLDER / f"{hardware.config or name}.yaml"
    if hardware.device is None:
        plan = paceline.plan(path, device_memory="16GB", **overrides)
    else:
        plan = paceline.plan(path, world_size=hardware.count, device=hardware.device, **overrides)
    run = plan["run"]
    used, total = run["memory_bytes"]["total"], plan["device_memory_bytes"]
    share = (
        f"{formatting.size(used)} of {formatting.size(total)} ({formatting.percent(used / total)})"
    )
    times = [
        formatting.short_duration(run["step_time_s"]),
        formatting.short_count(run["samples_per_second"]),
    ]
    if hardware.device is None:
        share, times = formatting.size(used), ["depends on the CPU", "–"]
    return f"| {' | '.join([f'`{name}`', hardware.text, run['mode'], share, *times])} |"


def main() -> None:
    """Print the table, or write it into a page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace the table in this page")
    page = parser.parse_args().write
    text = table()
    if page is None:
        print(text)
        return
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
