"""`paceline slurm`: write a batch script for Slurm."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from typing import TYPE_CHECKING

from paceline.commands.job_options import TimeLimit, add_hosts, check_required
from paceline.commands.options import (
    Integer,
    OptionParser,
    OutputFile,
    Pattern,
    add_config,
    config_and_overrides,
    print_notices,
)
from paceline.commands.reports import write_output
from paceline.core.errors import EXIT_DONE, ConfigError

if TYPE_CHECKING:
    from paceline.cluster.jobs.slurm import SlurmOptions

#: Options that are passed to sbatch unchanged.
_SBATCH_OPTIONS = ("partition", "account", "qos", "constraint", "reservation", "mem")
_SBATCH_VALUE = Pattern(r"[\w.,:@%+/=&|*()\[\]-]+", "a value of sbatch without spaces")
_MAX_GRACE_PERIOD_S = 65535  # Slurm stores it in 16 bits


def add_arguments(parser: OptionParser) -> None:
    add_config(parser, only_known_keys=True)
    add_hosts(parser)
    parser.add_option("--time", TimeLimit(), "LIMIT", "time limit of the job; required")
    parser.add_option(
        "--job-name",
        Pattern(r"[\w.+-]+", "letters, digits and . _ + -"),
        "NAME",
        "name of the job (default: name of the config file)",
    )
    parser.add_option(
        "--cpus-per-node",
        Integer(1, 4096),
        "N",
        "CPU cores per host (default: one per rank and loader process)",
    )
    parser.add_option(
        "--grace-period",
        Integer(),
        "SECONDS",
        "time before the end at which Slurm sends SIGTERM, so that a checkpoint is written",
        default=120,
    )
    for name in _SBATCH_OPTIONS:
        parser.add_option(f"--{name}", _SBATCH_VALUE, "VALUE", f"--{name} of sbatch")
    parser.add_option(
        "--output", OutputFile(), "FILE", "script to write (default: standard output)"
    )
    parser.add_flag("--submit", "submit the job with sbatch")
    parser.example = "paceline slurm CONFIG.yaml --nodes 2 --gpus-per-node 8 --time 4:00:00"


def run(args: Namespace) -> int:
    """Write or print the script, and submit it if requested.

    Raises:
        ConfigError: an option is invalid, or sbatch is not installed; nothing was written.
        RunError: Slurm rejected the job.
    """
    from paceline.cluster.jobs.slurm import check_sbatch, script, submit

    options = make_options(args)
    if args.submit:
        check_sbatch()
    print_notices(options.hosts.loaded.notices)
    text = script(options)
    if args.output is not None:
        write_output(args.output, text)
    job_id = submit(text) if args.submit else None
    if args.json:
        path = None if args.output is None else str(args.output)
        print(json.dumps({"script": text, "path": path, "job_id": job_id}, indent=2))
        return EXIT_DONE
    if args.output is None and not args.submit:
        print(text, end="")
    if job_id is not None:
        print(f"submitted job {job_id}; log: {options.name}-{job_id}.log")
    return EXIT_DONE


def make_options(args: Namespace) -> SlurmOptions:
    """Check the options against each other, and fit the config to the hosts.

    Raises:
        ConfigError: an option is missing, or the config is invalid or does not fit the hosts.
    """
    from paceline.cluster.jobs.hosts import fit_to_hosts
    from paceline.cluster.jobs.slurm import SlurmOptions

    path, overrides = config_and_overrides(args)
    check_required(args, "nodes", "gpus-per-node", "time")
    max_grace_s = min(args.time.seconds - 1, _MAX_GRACE_PERIOD_S)
    if not 1 <= args.grace_period <= max_grace_s:
        raise ConfigError(
            "`--grace-period {grace_period}` does not fit `--time {time}`",
            code="grace-period-too-long",
            allowed="1 to {max_grace_s} seconds, enough to write a checkpoint",
            grace_period=args.grace_period,
            time=args.time.text,
            max_grace_s=max_grace_s,
        )
    default_name = "paceline" if path is None else re.sub(r"[^\w.+-]+", "-", path.stem)
    hosts = fit_to_hosts(path, overrides, args.nodes, args.gpus_per_node)
    values = [(name, getattr(args, name)) for name in _SBATCH_OPTIONS]
    return SlurmOptions(
        hosts=hosts,
        time=args.time.text,
        grace_period_s=args.grace_period,
        cpus=args.cpus_per_node or hosts.min_cpus,
        name=args.job_name or default_name,
        sbatch_options=tuple((name, value) for name, value in values if value is not None),
    )
