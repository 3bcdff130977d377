"""Print what `paceline plan` predicts for the recipes on their hardware, as a Markdown table.

`python examples/recipes/predict.py --write docs/how-to/recipes.md` replaces the table in the guide.
"""

import argparse
from pathlib import Path

import paceline
from paceline.core import formatting

FOLDER = Path(__file__).parent
BEGIN, END = "<!-- predicted: begin -->", "<!-- predicted: end -->"

#: Recipe → number of devices, and their name in the planner's table. The other recipes run on CPUs,
#: whose speed the planner does not know.
HARDWARE = {
    "qwen-7b-lora-4xa10": (4, "A10"),
    "full-1.5b-24gb": (1, "RTX-4090"),
    "lora-70b-8x80gb": (8, "A100-80GB"),
    "two-boxes-gigabit": (2, "RTX-4090"),
    "image-classifier": (1, "RTX-4090"),
    "continued-pretraining": (8, "H100-SXM"),
}


def table() -> str:
    """Return the table."""
    lines = [
        "| recipe | hardware | strategy | memory per device | step | samples/s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*lines, *(row(name, *hardware) for name, hardware in HARDWARE.items())])


def row(name: str, count: int, device: str) -> str:
    """Return the row of a recipe."""
    # The planner reads the sizes of the images from the data, which is not there.
    overrides = {"dataset": "builtin:digits"} if name == "image-classifier" else {}
    plan = paceline.plan(FOLDER / f"{name}.yaml", world_size=count, device=device, **overrides)
    configured = plan["configured"] or plan["chosen"]
    mode = next(mode for mode in plan["modes"] if mode["mode"] == configured)
    used, total = mode["memory_bytes"]["total"], plan["device_memory_bytes"]
    cells = [
        f"`{name}`",
        f"{count} × {device}",
        mode["mode"],
        f"{formatting.size(used)} of {formatting.size(total)} ({formatting.percent(used / total)})",
        formatting.short_duration(mode["step_time_s"]),
        formatting.short_count(mode["samples_per_second"]),
    ]
    return f"| {' | '.join(cells)} |"


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
