"""`paceline slurm`: a batch script that trains a config on several nodes. It stops with a
checkpoint when Slurm sends SIGTERM, goes back into the queue, and resumes; so it does when the
command of a node was killed. https://slurm.schedmd.com/sbatch.html"""

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

from paceline.cluster.jobs.hosts import (
    COMMON,
    Hosts,
    check_options,
    check_output,
    for_hosts,
    needed,
    plain,
    time_limit_s,
    write,
)
from paceline.core.errors import EXIT_DONE, EXIT_SIGTERM, ConfigError, RunError

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
_REJOIN_S = 60


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
        ConfigError: an option is missing, unknown or wrong, or the config does not load or does not
            fit the nodes.
    """
    needed(values, "slurm", "nodes", "gpus-per-node", "time")
    limit_s = time_limit_s(values["time"])
    lead_s = values.get("signal-lead", _LEAD_S)
    if not 1 <= lead_s <= _MOST_LEAD_S or lead_s >= limit_s:
        raise ConfigError(
            f"`--signal-lead {lead_s}` does not fit `--time {values['time']}`",
            allowed=(
                f"1 to {min(limit_s - 1, _MOST_LEAD_S)} seconds before the end, time enough to"
                " write a checkpoint"
            ),
        )
    name = values.get(
        "job-name", "paceline" if path is None else re.sub(r"[^\w.+-]+", "-", path.stem)
    )
    plain("job-name", name, r"[\w.+-]+", "letters, digits and . _ + -")
    for one in _PASSED:
        if one in values:
            plain(one, values[one], _WORD, "one word, as sbatch takes it")
    output = check_output(values.get("output"))
    hosts = for_hosts(path, words, values["nodes"], values["gpus-per-node"])
    cpus = values.get("cpus-per-node", hosts.min_cpus)
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
            fix=(
                "give the command on a login node of the cluster; or leave `--submit` out and take"
                " the script there"
            ),
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
    header = "\n".join(
        f"#SBATCH --{name}" if value is None else f"#SBATCH --{name}={_quoted(value)}"
        for name, value in options
    )
    given = [str(hosts.given.absolute())] if hosts.given is not None else []
    words = (*hosts.words, *hosts.own, *_own_words(hosts))
    command = " \\\n  ".join(
        map(
            shlex.join,
            [[sys.executable, "-m", "paceline", "sft", *given], *([word] for word in words)],
        )
    )
    rendezvous, endpoint = (
        (_RENDEZVOUS, ' \\\n  "parallel.rdzv_endpoint=$address:$port"')
        if hosts.nodes > 1
        else ("", "")
    )
    return _SCRIPT.format(
        header=header,
        rendezvous=rendezvous,
        nodes=hosts.nodes,
        cpus=request.cpus,
        gpus=f" --gpus-per-node={hosts.gpus}" if hosts.gpus else "",
        command=command,
        endpoint=endpoint,
        stopped=EXIT_SIGTERM,
        checkpoints=shlex.quote(str(Path(hosts.config.output_dir, "checkpoints").expanduser())),
        max_restarts=hosts.config.recovery.max_restarts,
    )


def _own_words(hosts: Hosts) -> list[str]:
    """Slurm does not start a lost task again within the job, so the others wait for a short
    interruption at most."""
    chosen = hosts.nodes == 1 or "rejoin_s" in hosts.config.recovery.model_fields_set
    return [] if chosen else [f"recovery.rejoin_s={_REJOIN_S}"]


_SCRIPT = """\
#!/bin/bash
{header}

# One command per node, which starts the ranks of its node. When Slurm sends SIGTERM, all ranks finish the same step, write a
# checkpoint and end with exit code {stopped}.
{rendezvous}
srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --cpus-per-task={cpus}{gpus} \\
  --cpu-bind=none --kill-on-bad-exit=0 --wait=0 \\
  {command}{endpoint}
code=$?

# srun returns the highest exit code of the nodes: 0: done, 1: the run failed, 2: the config or the data are wrong,
# {stopped}: stopped with a checkpoint, 128 + N: the command of a node was killed by signal N, 253: out of memory.
reason=
case "$code" in
  {stopped})
    reason="stopped by a signal" ;;
  129 | 13[1-9] | 1[4-9][0-9])
    # Slurm does not start the killed command again within this allocation. After a requeue the run resumes from its newest
    # checkpoint. A job that is killed more than {max_restarts} times without a new checkpoint fails.
    state=".$SLURM_JOB_NAME-$SLURM_JOB_ID.killed"
    newest=$(ls -d {checkpoints}/step-* 2> /dev/null | tail -n 1)
    {{ read -r count && read -r previous; }} 2> /dev/null < "$state" || count=0
    [ "$newest" = "$previous" ] || count=0
    count=$((count + 1))
    printf '%s\\n' "$count" "$newest" > "$state"
    if [ "$count" -le {max_restarts} ]; then
      reason="killed on a node by signal $((code - 128)) (time $count of {max_restarts} without a new checkpoint)"
    fi ;;
esac
if [ -n "$reason" ]; then
  echo "$reason: job $SLURM_JOB_ID goes back into the queue; to end it for good: scancel $SLURM_JOB_ID"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""

_RENDEZVOUS = """\

# The rendezvous endpoint is the first node, under the address that Slurm itself uses for it; the port follows from the job's
# number.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node --oneliner "$first" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')
address=${address:-$first}
port=$((20000 + SLURM_JOB_ID % 10000))
"""


def _quoted(value: object) -> str:
    """For a line of `#SBATCH`, which takes double quotes."""
    text = str(value)
    return f'"{text}"' if re.search(r"\s", text) else text


def _submit(text: str) -> int:
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
            f"sbatch could not be run: {error}", fix="see whether `sinfo` answers"
        ) from error
    number = done.stdout.strip().partition(";")[0]
    if done.returncode or not number.isdecimal():
        said = (done.stderr or done.stdout).strip().replace(
            "\n", "; "
        ) or f"exit code {done.returncode}"
        raise RunError(
            f"Slurm refused the job: {said}", fix="see `sinfo` for partitions and their limits"
        )
    return int(number)
