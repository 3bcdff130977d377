"""`paceline sft` (or `train`): train a model from a config."""

import json
from argparse import Namespace

from paceline.commands.options import OptionParser, add_config, load_job_config
from paceline.core.processes import process_start_time


def add_arguments(parser: OptionParser) -> None:
    add_config(parser)
    parser.add_flag("--dry-run", "check and print the full config without training")
    parser.add_flag("--allow-config-change", "resume although the config has changed")
    parser.example = "paceline sft model=builtin:qwen2-tiny dataset=builtin:python-docs"


def run(args: Namespace) -> int:
    """Train; the report is printed with `--json`."""
    from paceline.api import run as train
    from paceline.config.load import dump_yaml

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
        resolved = result.resolved
        assert resolved is not None
        text = json.dumps(resolved, indent=2) if args.json else dump_yaml(resolved["config"])
        print(text, end="")
    elif args.json:
        print(json.dumps(result.report, indent=2))
    return result.exit_code
