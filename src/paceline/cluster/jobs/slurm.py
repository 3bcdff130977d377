"""`paceline slurm`: a batch script that trains a config on several nodes. It stops with a
checkpoint when Slurm sends SIGTERM, goes back into the queue, and resumes; so it does when the
command of a node was killed. https://slurm.schedmd.com/sbatch.html"""

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.jobs.hosts import Hosts
from paceline.core.errors import EXIT_SIGTERM, ConfigError, RunError

_SUBMIT_TIMEOUT_S = 120.0
_REJOIN_S = 60


@dataclass(frozen=True)
class SlurmOptions:
    """A batch job.

    Args:
        time: in Slurm's notation.
        grace_period_s: so long before the end Slurm sends SIGTERM.
        cpus: per node.
        sbatch_options: options of sbatch and their values, passed on as they are.
    """

    hosts: Hosts
    time: str
    grace_period_s: int
    cpus: int
    name: str
    sbatch_options: tuple[tuple[str, str], ...] = ()


def check_sbatch() -> None:
    """Raise ConfigError if sbatch is not here."""
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "`--submit` needs Slurm's command sbatch, and it is not on this machine's PATH",
            fix=(
                "give the command on a login node of the cluster; or leave `--submit` out and take"
                " the script there"
            ),
        )


def script(options: SlurmOptions) -> str:
    """The batch script, as text for bash."""
    hosts = options.hosts
    lines = [
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
    header = "\n".join(
        f"#SBATCH --{name}" if value is None else f"#SBATCH --{name}={_quoted(value)}"
        for name, value in lines
    )
    path = [str(hosts.config_path.absolute())] if hosts.config_path is not None else []
    overrides = (*hosts.overrides, *hosts.derived_overrides, *_rejoin_overrides(hosts))
    command = " \\\n  ".join(
        map(
            shlex.join,
            [
                [sys.executable, "-m", "paceline", "sft", *path],
                *([override] for override in overrides),
            ],
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
        cpus=options.cpus,
        gpus=f" --gpus-per-node={hosts.gpus}" if hosts.gpus else "",
        command=command,
        endpoint=endpoint,
        stopped=EXIT_SIGTERM,
        checkpoints=shlex.quote(str(Path(hosts.config.output_dir, "checkpoints").expanduser())),
        max_restarts=hosts.config.recovery.max_restarts,
    )


def _rejoin_overrides(hosts: Hosts) -> list[str]:
    """Slurm does not start a lost task again within the job, so the others wait for a short
    interruption at most."""
    chosen = hosts.nodes == 1 or "rejoin_timeout_s" in hosts.config.recovery.model_fields_set
    return [] if chosen else [f"recovery.rejoin_timeout_s={_REJOIN_S}"]


_SCRIPT = """\
#!/bin/bash
{header}

# One command per node, which starts the ranks of its node. When Slurm sends SIGTERM, all ranks
# finish the same step, write a checkpoint and end with exit code {stopped}.
{rendezvous}
srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --cpus-per-task={cpus}{gpus} \\
  --cpu-bind=none --kill-on-bad-exit=0 --wait=0 \\
  {command}{endpoint}
code=$?

# srun returns the highest exit code of the nodes: 0: done, 1: the run failed, 2: the config or the
# data are wrong, {stopped}: stopped with a checkpoint, 128 + N: the command of a node was killed by
# signal N, 253: out of memory.
reason=
case "$code" in
  {stopped})
    reason="stopped by a signal" ;;
  129 | 13[1-9] | 1[4-9][0-9])
    # Slurm does not restart the killed command within this allocation. After a requeue the run
    # resumes from its latest checkpoint. A job that is killed more than {max_restarts} times
    # without a new checkpoint fails.
    state=".$SLURM_JOB_NAME-$SLURM_JOB_ID.killed"
    newest=$(ls -d {checkpoints}/step-* 2> /dev/null | tail -n 1)
    {{ read -r count && read -r previous; }} 2> /dev/null < "$state" || count=0
    [ "$newest" = "$previous" ] || count=0
    count=$((count + 1))
    printf '%s\\n' "$count" "$newest" > "$state"
    if [ "$count" -le {max_restarts} ]; then
      reason="killed on a node by signal $((code - 128))"
      reason="$reason (time $count of {max_restarts} without a new checkpoint)"
    fi ;;
esac
if [ -n "$reason" ]; then
  echo "$reason: job $SLURM_JOB_ID goes back into the queue; to end it: scancel $SLURM_JOB_ID"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""

_RENDEZVOUS = """\

# The rendezvous endpoint is the first node, under the address that Slurm itself uses for it; the
# port follows from the job's number.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node --oneliner "$first" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')
address=${address:-$first}
port=$((20000 + SLURM_JOB_ID % 10000))
"""


def _quoted(value: object) -> str:
    """For a line of `#SBATCH`, which takes double quotes."""
    text = str(value)
    return f'"{text}"' if re.search(r"\s", text) else text


def submit(text: str) -> int:
    """Submit a batch script. Returns the job's number.

    Raises:
        RunError: Slurm refused the job.
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
            f"sbatch could not be run: {error}", fix="see whether `sinfo` answers"
        ) from error
    number = done.stdout.strip().partition(";")[0]
    if done.returncode or not number.isdecimal():
        message = (done.stderr or done.stdout).strip().replace(
            "\n", "; "
        ) or f"exit code {done.returncode}"
        raise RunError(
            f"Slurm refused the job: {message}", fix="see `sinfo` for partitions and their limits"
        )
    return int(number)
