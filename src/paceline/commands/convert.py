"""`paceline convert`: write a config of another tool with Paceline's own keys."""

import json
from argparse import Namespace

from paceline.commands.options import (
    OptionParser,
    OutputFile,
    add_config,
    config_and_overrides,
    print_notices,
)
from paceline.commands.reports import write_output
from paceline.core.errors import EXIT_DONE, ConfigError


def add_arguments(parser: OptionParser) -> None:
    add_config(parser, only_known_keys=True)
    parser.add_option(
        "--output",
        OutputFile("a YAML file"),
        "FILE",
        "new file to write (default: standard output)",
    )
    parser.example = "paceline convert axolotl.yaml --output mine.yaml"


def run(args: Namespace) -> int:
    """Print or write the config. What was converted, and what has no effect, goes to the standard
    error."""
    from paceline.config.load import dump_yaml, load_config, own_keys

    path, overrides = config_and_overrides(args)
    if path is None:
        raise ConfigError(
            "a config file is required",
            code="missing-config-file",
            fix="name it: paceline convert CONFIG.yaml",
        )
    if args.output is not None and args.output.exists():
        raise ConfigError(
            "`--output {output}` already exists",
            code="output-exists",
            fix="name a new file, or remove that one",
            output=args.output,
        )
    loaded = load_config(path, overrides)
    print_notices(loaded.notices)
    keys = own_keys(loaded.config)
    if args.output is not None:
        write_output(args.output, dump_yaml(keys))
    if args.json:
        print(json.dumps({"config": keys}, indent=2))
    elif args.output is None:
        print(dump_yaml(keys), end="")
    return EXIT_DONE
