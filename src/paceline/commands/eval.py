"""`paceline eval`: evaluate the model of a run with lm-evaluation-harness."""

from __future__ import annotations

import contextlib
import json
import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from paceline.commands.options import AnyPath, AnyText, CommaList, Integer, OptionParser
from paceline.core.errors import EXIT_DONE, ConfigError

if TYPE_CHECKING:
    from paceline.config.schema.evaluation import LmEval


def add_arguments(parser: OptionParser) -> None:
    parser.add_option("run_dir", AnyPath("its output_dir"), "RUN", "run")
    parser.add_option(
        "--tasks",
        CommaList(AnyText()),
        "NAMES",
        "tasks or groups of tasks, separated by commas (default: `evaluation.lm_eval` of the"
        " run's config, with its other settings)",
    )
    parser.add_option(
        "--include-path", AnyText("a folder"), "DIR", "folder with further tasks as YAML files"
    )
    parser.add_option("--limit", Integer(1), "N", "number of rows of each task (default: all)")
    parser.add_option(
        "--num-fewshot",
        Integer(0),
        "N",
        "number of examples in each prompt (default: as the task defines it)",
    )
    parser.add_option(
        "--batch-size", Integer(1), "N", "number of prompts per forward pass (default: 8)"
    )
    parser.add_flag(
        "--apply-chat-template", "format the prompts with the chat template of the tokenizer"
    )
    parser.example = "paceline eval output/demo --tasks arc_easy,hellaswag --limit 100"


def run(args: Namespace) -> int:
    """Evaluate the model, and print the metrics of each task."""
    from paceline.inference.lm_eval import evaluate_model

    settings = _settings(args)
    # The output of libraries is not part of the result.
    with contextlib.redirect_stdout(sys.stderr):
        results = evaluate_model(args.run_dir, settings)
    if args.json:
        print(json.dumps(results))
        return EXIT_DONE
    for task, metrics in results["results"].items():
        for name, value in metrics.items():
            print(f"{task:<24} {name:<24} {value:.4f}")
    return EXIT_DONE


def _settings(args: Namespace) -> LmEval:
    from paceline.config.load import load_config
    from paceline.config.schema.evaluation import LmEval

    options = {
        name: value
        for name in LmEval.model_fields
        if (value := getattr(args, name)) not in (None, False)
    }
    if "tasks" in options:
        return LmEval.model_validate(options)
    path = args.run_dir / "config.yaml"
    settings = load_config(path, {}).config.evaluation.lm_eval if path.is_file() else None
    if settings is None:
        raise ConfigError(
            "`paceline eval` needs tasks",
            code="missing-tasks",
            allowed="--tasks NAMES, or `evaluation.lm_eval` in the config of the run",
            fix="add e.g. `--tasks arc_easy`",
        )
    return settings.model_copy(update=options)
