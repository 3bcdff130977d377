"""`paceline sft` (or `train`): train a model from a config."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import TYPE_CHECKING

from paceline.commands.options import OptionParser, add_config, load_job_config
from paceline.core.errors import ConfigError
from paceline.core.processes import process_start_time

if TYPE_CHECKING:
    from paceline.train.run_spec import ResolvedRun


def add_arguments(parser: OptionParser) -> None:
    add_config(parser)
    parser.add_flag(
        "--dry-run",
        "check the run without training, and print the keys that differ from their defaults",
    )
    parser.add_flag("--full", "with `--dry-run`: print all keys")
    parser.add_flag("--allow-config-change", "resume although the config has changed")
    parser.example = "paceline sft model=builtin:qwen2-tiny dataset=builtin:python-docs"


def run(args: Namespace) -> int:
    """Train; the report is printed with `--json`."""
    from paceline.api import run as train

    if args.full and not args.dry_run:
        raise ConfigError(
            "`--full` is an option of a dry run", code="full-without-dry-run", fix="add `--dry-run`"
        )
    started_at = process_start_time()
    loaded = load_job_config(args)
    result = train(
        loaded,
        started_at,
        dry_run=args.dry_run,
        debug=args.debug,
        allow_config_change=args.allow_config_change,
    )
    if args.dry_run:
        assert result.resolved is not None
        _print_dry_run(result.resolved, as_json=args.json, is_full=args.full)
    elif args.json:
        print(json.dumps(result.report, indent=2))
    return result.exit_code


def _print_dry_run(resolved: ResolvedRun, *, as_json: bool, is_full: bool) -> None:
    """Print the config, then what follows from it, which is read most."""
    from paceline.config.load import dump_yaml, find_changed_keys
    from paceline.launch.results import log_derived

    config = resolved["config"]
    if as_json:
        print(json.dumps(resolved, indent=2), end="")
    else:
        print(dump_yaml(config if is_full else find_changed_keys(config)), flush=True)
    log_derived(resolved["derived"])
