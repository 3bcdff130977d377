"""`paceline slurm`: a batch script that trains a config on several nodes.

When Slurm sends SIGTERM, the job stops with a checkpoint, goes back into the queue, and resumes; so
it does when the command of a node was killed. https://slurm.schedmd.com/sbatch.html
"""

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.jobs.hosts import Hosts, template
from paceline.core.errors import EXIT_SIGTERM, ConfigError, RunError

_SUBMIT_TIMEOUT_S = 120.0
#: Slurm does not restart a lost task within the job, so the others wait only for a short time.
_REJOIN_S = 60


@dataclass(frozen=True)
class SlurmOptions:
    """A batch job.

    Args:
        time: in Slurm's notation.
        grace_period_s: how long before the time limit Slurm sends SIGTERM.
        cpus: per node.
        sbatch_options: options of sbatch and their values, passed on unchanged.
    """

    hosts: Hosts
    time: str
    grace_period_s: int
    cpus: int
    name: str
    sbatch_options: tuple[tuple[str, str], ...] = ()


def check_sbatch() -> None:
    """Raise ConfigError if sbatch is not available."""
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "`--submit` requires Slurm's command sbatch, which is not on the PATH of this machine",
            code="missing-sbatch",
            fix="run the command on a login node of the cluster; or remove `--submit` and copy the"
            " script there",
        )


def script(options: SlurmOptions) -> str:
    """Return the batch script, for bash."""
    hosts = options.hosts
    header = [
        ("job-name", options.name),
        ("nodes", hosts.nodes),
        ("ntasks-per-node", 1),
        ("cpus-per-task", options.cpus),
        *([("gpus-per-node", hosts.gpus)] if hosts.gpus else []),
        ("time", options.time),
        *options.sbatch_options,
        ("chdir", Path.cwd()),
        ("output", "%x-%j.log"),
        ("open-mode", "append"),
        ("requeue", None),
        ("signal", f"TERM@{options.grace_period_s}"),
    ]
    overrides = [*hosts.overrides, *hosts.derived_overrides]
    if hosts.nodes > 1 and "rejoin_timeout_s" not in hosts.config.recovery.model_fields_set:
        overrides.append(f"recovery.rejoin_timeout_s={_REJOIN_S}")
    path = [] if hosts.config_path is None else [str(hosts.config_path.absolute())]
    command = [sys.executable, "-m", "paceline", "sft", *path]
    lines = [shlex.join(command), *map(shlex.quote, overrides)]
    if hosts.nodes > 1:
        lines.append('"parallel.rdzv_endpoint=$address:$port"')
    return template("slurm.sh.jinja").render(
        header=[name if value is None else f"{name}={_quoted(value)}" for name, value in header],
        nodes=hosts.nodes,
        cpus=options.cpus,
        gpus=hosts.gpus,
        command=" \\\n  ".join(lines),
        stopped=EXIT_SIGTERM,
        checkpoints=shlex.quote(str(Path(hosts.config.output_dir, "checkpoints").expanduser())),
        max_restarts=hosts.config.recovery.max_restarts,
    )


def _quoted(value: object) -> str:
    """Quote a value for a line of `#SBATCH`, which accepts only double quotes."""
    text = str(value)
    return f'"{text}"' if re.search(r"\s", text) else text


def submit(text: str) -> int:
    """Submit a batch script, and return the job ID.

    Raises:
        RunError: Slurm rejected the job.
    """
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"],
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=_SUBMIT_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError(
            "sbatch could not be run: {reason}",
            code="sbatch-failed",
            fix="check that `sinfo` works",
            reason=error,
        ) from error
    number = done.stdout.strip().partition(";")[0]
    if done.returncode or not number.isdecimal():
        message = "; ".join((done.stderr or done.stdout).strip().splitlines())
        raise RunError(
            "Slurm rejected the job: {message}",
            code="job-rejected",
            fix="see `sinfo` for partitions and their limits",
            message=message or f"exit code {done.returncode}",
        )
    return int(number)
