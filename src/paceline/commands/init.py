"""`paceline init`: write a config for a model and a dataset."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.commands.options import AnyText, OptionParser, OutputFile
from paceline.commands.reports import write_output
from paceline.core.errors import EXIT_DONE, ConfigError
from paceline.core.run_dir import propose_folder

if TYPE_CHECKING:
    from paceline.config.yaml_read import YamlValue
    from paceline.planner.api import PlanReport

    Keys = dict[str, YamlValue]

_QUESTIONS = {
    "model": "Model (a hub id, a folder, or builtin:NAME): ",
    "dataset": "Dataset (a file, a folder, a hub id, or builtin:NAME): ",
}
_TEXT = """\
# Written by `paceline init`. Check it: paceline sft {file} --dry-run. Train: paceline sft {file}
# All keys: paceline config. One key: paceline config train_args.learning_rate
{keys}
# Checkpoints, the report and the trained model are written here.
output_dir: {output_dir}

# Evaluate on a share of the samples that is held out.
# split_dataset_ratio: 0.05

{adapters}train_args:
  num_train_epochs: 3
  # Default: it follows from the kind of training.
  # learning_rate: 1e-4
  # Samples per step, whatever the number of devices.
  # global_batch_size: 32
"""
_ALL_WEIGHTS = """\
# All weights are trained. Adapters need less memory:
# lora: {enable: true, rank: 8}

"""
_ADAPTERS = """\
# Adapters are trained: all weights do not fit into the memory of these devices.
lora: {enable: true, rank: 8}

"""


def add_arguments(parser: OptionParser) -> None:
    parser.add_option(
        "file",
        OutputFile("a YAML file"),
        "FILE",
        "file to write (default: paceline.yaml)",
        nargs="?",
        default="paceline.yaml",
    )
    for name, question in _QUESTIONS.items():
        description = question[0].lower() + question.removesuffix(": ")[1:]
        parser.add_option(f"--{name}", AnyText(may_be_empty=False), "NAME", description)
    parser.add_option(
        "--task", AnyText(may_be_empty=False), "TASK", "kind of training", default="sft"
    )
    parser.example = "paceline init mine.yaml --model Qwen/Qwen2.5-0.5B --dataset ./questions.jsonl"


def run(args: Namespace) -> int:
    """Ask for what lacks, find a config that fits into memory, and write it."""
    file = Path(args.file)
    if file.exists():
        raise ConfigError(
            "{file} already exists",
            code="config-exists",
            fix="name a new file: paceline init FILE",
            file=file,
        )
    keys: Keys = {name: getattr(args, name) or _ask(name) for name in _QUESTIONS}
    if args.task != "sft":
        keys["task"] = args.task
    keys["output_dir"] = _output_dir(file)
    adapters, report = _choose(keys)
    write_output(file, _text(file, keys, adapters))
    if args.json:
        print(json.dumps({"path": str(file), "run": report["run"]}, indent=2))
    else:
        print(f"check it: paceline sft {file} --dry-run\ntrain:    paceline sft {file}")
    return EXIT_DONE


def _ask(name: str) -> str:
    """Ask for a key in the terminal.

    Raises:
        ConfigError: there is no terminal, or no answer.
    """
    if sys.stdin.isatty():
        print(_QUESTIONS[name], end="", file=sys.stderr, flush=True)
        if answer := sys.stdin.readline().strip():
            return answer
    raise ConfigError(
        "no {name} is named", code="missing-name", fix="add `--{name} NAME`", name=name
    )


def _output_dir(file: Path) -> str:
    folder = f"output/{file.stem}"
    return propose_folder(folder) if Path(folder).exists() else folder


def _choose(keys: Keys) -> tuple[str, PlanReport]:
    """Return the text about adapters, which are trained if all weights do not fit, and the plan.

    Raises:
        ConfigError: the model, the data or the task cannot be used, or neither fits.
    """
    from paceline.config.load import load_config
    from paceline.config.packages import unused_packages
    from paceline.config.schema.tasks import CAUSAL_TASKS
    from paceline.core.user_code import hide_packages
    from paceline.planner.api import plan
    from paceline.tasks import check_inputs

    config = load_config(None, keys).config
    hide_packages(unused_packages(config))
    check_inputs(config)
    full, can_adapt = plan(keys), config.task in (*CAUSAL_TASKS, "reward")
    if _fits(full):
        return _ALL_WEIGHTS if can_adapt else "", full
    if can_adapt:
        with_adapters = plan(keys, lora={"enable": True})
        if _fits(with_adapters):
            return _ADAPTERS, with_adapters
    raise ConfigError(
        "{model} does not fit into the memory of these devices: {why}",
        code="model-too-large",
        fix="name a smaller model; `paceline plan` shows what each mode needs",
        model=config.model,
        why=full["why"],
    )


def _fits(report: PlanReport) -> bool:
    return report["run"] is not None and report["run"]["fits"]


def _text(file: Path, keys: Keys, adapters: str) -> str:
    from paceline.config.load import dump_yaml

    named = {name: value for name, value in keys.items() if name != "output_dir"}
    output_dir = dump_yaml({"output_dir": keys["output_dir"]}).partition(": ")[2].strip()
    return _TEXT.format(
        file=file,
        keys=dump_yaml(named),
        output_dir=output_dir,
        adapters=adapters,
    )
