"""`paceline slurm`: a batch script that trains a config on several nodes, stops with a checkpoint when Slurm says so, goes back
into the queue, and goes on. What Slurm promises: https://slurm.schedmd.com/sbatch.html."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import EXIT_DONE, EXIT_SIGTERM, ConfigError, RunError
from paceline.launch.cluster import COMMON, Hosts, check_options, check_output, for_hosts, needed, plain, write

#: Passed on to Slurm as they are.
_PASSED = ("partition", "account", "qos", "constraint", "reservation", "mem")
#: The options of the verb: how each is read.
VALUES: dict[str, Callable[[str], Any]] = {
    **COMMON, "time": str, "job-name": str, "cpus-per-node": int, "signal-lead": int, **dict.fromkeys(_PASSED, str),
}  # fmt: skip
_WORD = r"[\w.,:@%+/=&|*()\[\]-]+"
_LEAD_S = 120
_MOST_LEAD_S = 65535  # Slurm keeps it in 16 bits
_SUBMIT_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Request:
    """What the command line says."""

    hosts: Hosts
    time: str
    lead_s: int
    cpus: int
    name: str
    passed: tuple[tuple[str, str], ...]
    output: Path | None


def make_request(path: Path | None, words: list[str], values: dict[str, Any]) -> Request:
    """Check the words of the command line.

    Raises:
        ConfigError: an option is missing, unknown or wrong, or the config does not load or does not fit the nodes.
    """
    needed(values, "slurm", "nodes", "gpus-per-node", "time")
    limit_s = _seconds(values["time"])
    lead_s = values.get("signal-lead", _LEAD_S)
    if not 1 <= lead_s <= _MOST_LEAD_S or lead_s >= limit_s:
        raise ConfigError(
            f"`--signal-lead {lead_s}` does not fit `--time {values['time']}`",
            allowed=f"1 to {min(limit_s - 1, _MOST_LEAD_S)} seconds before the end, time enough to write a checkpoint",
        )
    name = values.get("job-name", "paceline" if path is None else re.sub(r"[^\w.+-]+", "-", path.stem))
    plain("job-name", name, r"[\w.+-]+", "letters, digits and . _ + -")
    for one in _PASSED:
        if one in values:
            plain(one, values[one], _WORD, "one word, as sbatch takes it")
    output = check_output(values.get("output"))
    hosts = for_hosts(path, words, values["nodes"], values["gpus-per-node"])
    cpus = values.get("cpus-per-node", _cpus(hosts))
    if not 1 <= cpus <= 4096:
        raise ConfigError(f"`--cpus-per-node {cpus}` is out of range", allowed="1 to 4,096")
    passed = tuple((one, values[one]) for one in _PASSED if one in values)
    return Request(hosts, values["time"], lead_s, cpus, name, passed, output)


def check_slurm_options(tokens: list[str]) -> None:
    """Raise ConfigError for a word that is no option here, and no key of the config."""
    check_options(tokens, "slurm", [*VALUES, "submit", "json"])


def slurm(request: Request, submit: bool, as_json: bool) -> int:
    """Write the script, submit it where asked, print. Returns the exit code.

    Raises:
        ConfigError: there is no sbatch here; nothing is written then.
        RunError: Slurm refused the job.
    """
    if submit and shutil.which("sbatch") is None:
        raise ConfigError(
            "`--submit` needs Slurm's command sbatch, and it is not on this machine's PATH",
            fix="give the command on a login node of the cluster; or leave `--submit` out and take the script there",
        )
    for level, text in request.hosts.loaded.notices:
        print(f"{'warning: ' if level == 'warning' else ''}{text}", file=sys.stderr)
    text = script(request)
    if request.output is not None:
        write(request.output, text)
    job = _submit(text) if submit else None
    if as_json:
        path = None if request.output is None else str(request.output)
        print(json.dumps({"script": text, "path": path, "job_id": job}, indent=2))
        return EXIT_DONE
    if request.output is not None:
        print(f"written: {request.output}")
    elif not submit:
        print(text, end="")
    if job is not None:
        print(f"submitted: job {job}, its log: {request.name}-{job}.log")
    return EXIT_DONE


def script(request: Request) -> str:
    """The batch script, as text for bash."""
    hosts = request.hosts
    options = [
        ("job-name", request.name),
        ("nodes", hosts.nodes),
        ("ntasks-per-node", 1),
        ("cpus-per-task", request.cpus),
        *([("gpus-per-node", hosts.gpus)] if hosts.gpus else []),
        ("time", request.time),
        *request.passed,
        ("chdir", Path.cwd()),
        ("output", "%x-%j.log"),
        ("open-mode", "append"),
        ("requeue", None),
        ("signal", f"TERM@{request.lead_s}"),
    ]
    head = "\n".join(f"#SBATCH --{name}" if value is None else f"#SBATCH --{name}={_quoted(value)}" for name, value in options)
    given = [str(hosts.given.absolute())] if hosts.given is not None else []
    lines = [[sys.executable, "-m", "paceline", "sft", *given], *([one] for one in (*hosts.words, *hosts.own))]
    command = " \\\n  ".join(map(shlex.join, lines))
    meet, where = (_MEET, ' \\\n  "parallel.rdzv_endpoint=$address:$port"') if hosts.nodes > 1 else ("", "")
    gpus = f" --gpus-per-node={hosts.gpus}" if hosts.gpus else ""
    return _SCRIPT.format(
        head=head,
        meet=meet,
        nodes=hosts.nodes,
        cpus=request.cpus,
        gpus=gpus,
        command=command,
        where=where,
        stopped=EXIT_SIGTERM,
    )


_SCRIPT = """\
#!/bin/bash
{head}

# One launcher a node; it starts the ranks of its node. Slurm's signal goes to the launchers: all ranks finish the same step,
# write a checkpoint, and end with {stopped}. The job then goes back into the queue, and the same command goes on from there.
{meet}
srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --cpus-per-task={cpus}{gpus} \\
  --cpu-bind=none --kill-on-bad-exit=0 --wait=0 \\
  {command}{where}
code=$?

if [ "$code" -eq {stopped} ]; then
  echo "stopped by a signal: job $SLURM_JOB_ID goes back into the queue; to end it for good: scancel $SLURM_JOB_ID"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""

_MEET = """\

# The first node is the head, under the address that Slurm itself reaches it by; the port follows from the job's number.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node --oneliner "$head" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')
address=${address:-$head}
port=$((20000 + SLURM_JOB_ID % 10000))
"""


def _quoted(value: object) -> str:
    """For a line of `#SBATCH`, which takes double quotes."""
    text = str(value)
    return f'"{text}"' if re.search(r"\s", text) else text


def _cpus(hosts: Hosts) -> int:
    """The least that the ranks and their loader processes need on a node: a core each."""
    ranks = hosts.ranks_per_node or 2
    return ranks * (1 + hosts.config.train_args.dataloader_num_workers)


def _seconds(text: str) -> int:
    """A time limit as Slurm writes it, in seconds.

    Raises:
        ConfigError: it is none.
    """
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    numbers = [*([days] if dash else []), *parts]
    seconds = 0
    if len(parts) <= 3 and all(re.fullmatch(r"[0-9]{1,6}", one) for one in numbers):
        fields = [int(one) for one in parts]
        if dash:
            hours, minutes, rest_s = [*fields, 0, 0][:3]
        elif len(fields) == 3:
            hours, minutes, rest_s = fields
        else:
            hours, (minutes, rest_s) = 0, [*fields, 0][:2]
        leading = [len(fields) == 3 or bool(dash), len(fields) > 1]  # minutes, seconds that follow a larger unit
        if not (leading[0] and minutes >= 60) and not (leading[1] and rest_s >= 60):
            seconds = ((int(days) if dash else 0) * 24 + hours) * 3600 + minutes * 60 + rest_s
    if not seconds:
        raise ConfigError(
            f"`--time {text}` is no time limit",
            allowed="minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, or with :seconds",
            fix="write e.g. `--time 4:00:00` for four hours",
        )
    return seconds


def _submit(text: str) -> int:
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"], input=text, capture_output=True, text=True, check=False, timeout=_SUBMIT_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError(f"sbatch could not be run: {error}", fix="see whether `sinfo` answers") from error
    number = done.stdout.strip().partition(";")[0]
    if done.returncode or not number.isdecimal():
        said = (done.stderr or done.stdout).strip().replace("\n", "; ") or f"exit code {done.returncode}"
        raise RunError(f"Slurm refused the job: {said}", fix="see `sinfo` for partitions and their limits")
    return int(number)
