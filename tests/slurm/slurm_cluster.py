"""Run a real Slurm cluster of two nodes on this machine: munged, slurmctld and two slurmd of the
system's packages, with all files in a temporary folder.

For manual use, ``python tests/slurm/slurm_cluster.py`` starts the cluster, prints the variable to
export, and stops the cluster at Ctrl-C.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
NODES = ("n1", "n2")
_ENDED = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "BOOT_FAIL",
    "OUT_OF_MEMORY",
    "DEADLINE",
    "REQUEUE_HOLD",
)
_START_TIMEOUT_S = 30.0

CONFIG = """\
ClusterName=paceline
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
# A requeued job waits until its old credentials have expired, by default 120 seconds.
AuthInfo=socket={folder}/munge.sock,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=60
SchedulerParameters=sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={names[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName={names[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 MaxTime=INFINITE State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""
CGROUP_CONFIG = """\
CgroupAutomount=no
CgroupPlugin={plugin}
"""


def missing_requirement() -> str | None:
    """Return why this machine cannot run Slurm, or None if it can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (apt-get install slurm-wlm munge)"
    return None if os.geteuid() == 0 else "slurmd needs root"


@dataclass(frozen=True)
class Cluster:
    """A running Slurm cluster.

    Args:
        environment: environment variables for Slurm's commands.
        daemons: the process of each daemon by name; that of a slurmd by its node.
    """

    folder: Path
    environment: dict[str, str]
    daemons: dict[str, subprocess.Popen[bytes]]

    def __call__(self, *command: str) -> str:
        """Run a Slurm command; return its output."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}{self.logs()}"
        return done.stdout

    def job(self, number: int | str) -> dict[str, str]:
        """Return the fields of a job (of an array: ``NUMBER_TASK``) from `scontrol show job`."""
        return dict(
            re.findall(r"(\w+)=(\S*)", self("scontrol", "show", "job", "--oneliner", str(number)))
        )

    def wait_for(self, number: int | str, *states: str, timeout_s: float = 120.0) -> dict[str, str]:
        """Wait until the job is in one of these states; return its fields. Fail if it ends in
        another state."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            result = self.job(number)
            if result["JobState"] in states:
                return result
            assert result["JobState"] not in _ENDED, f"{result}{self.logs()}"
            time.sleep(0.2)
        raise AssertionError(
            f"job {number} did not reach {states}: {self.job(number)}{self.logs()}"
        )

    def start(self, name: str, command: list[str]) -> None:
        """Start a daemon that logs to the cluster's folder."""
        with (self.folder / f"{name}-output.log").open("ab") as out:
            self.daemons[name] = subprocess.Popen(
                command, env=self.environment, stdout=out, stderr=out, start_new_session=True
            )

    def lose_node(self, node: str) -> None:
        """Kill all processes of a node at once, as a power failure would, and mark it as down in
        Slurm instead of waiting for SlurmdTimeout."""
        tasks = [
            process
            for process in psutil.process_iter()
            if _environment(process).get("SLURMD_NODENAME") == node
        ]
        parents = [process.parent() for process in tasks]
        step_daemons = [
            process for process in parents if process is not None and process.name() == "slurmstepd"
        ]
        for process in (psutil.Process(self.daemons[node].pid), *step_daemons, *tasks):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.daemons[node].wait()
        self("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    def boot_node(self, node: str) -> None:
        """Start a lost node again."""
        self.start(node, ["slurmd", "-D", "-N", node])
        self("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def logs(self) -> str:
        """Return the ends of all of Slurm's logs."""
        logs = sorted(self.folder.glob("*.log"))
        return "".join(
            f"\n--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs
        )


@contextmanager
def start_slurm_cluster() -> Iterator[Cluster]:
    """Start a cluster; at the end, stop it with its jobs and remove its files."""
    # A short path, because the path of a socket is limited to 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    ports = _free_ports(3)
    host = socket.gethostname().partition(".")[0]
    unified = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    (folder / "slurm.conf").write_text(
        CONFIG.format(folder=folder, host=host, ports=ports, names=NODES)
    )
    (folder / "cgroup.conf").write_text(
        CGROUP_CONFIG.format(plugin="cgroup/v2" if unified else "cgroup/v1")
    )
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    folder.chmod(0o755)
    cluster = Cluster(folder, {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}, {})
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
    try:
        cluster.start(
            "munged", ["munged", "--foreground", "--force", f"--socket={folder}/munge.sock", *files]
        )
        _wait_until(cluster, (folder / "munge.sock").exists)
        cluster.start("slurmctld", ["slurmctld", "-D"])
        for node in NODES:
            cluster.start(node, ["slurmd", "-D", "-N", node])
        _wait_until(cluster, lambda: _count_idle_nodes(cluster) == len(NODES))
        yield cluster
    finally:
        _stop(cluster)
        shutil.rmtree(folder, ignore_errors=True)


def _count_idle_nodes(cluster: Cluster) -> int:
    command = ["sinfo", "--noheader", "--Node", "--partition=low", "--states=idle", "--format=%N"]
    done = subprocess.run(
        command, env=cluster.environment, capture_output=True, text=True, timeout=60
    )
    return len(done.stdout.split())


def _wait_until(cluster: Cluster, is_ready) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not is_ready():
        assert time.monotonic() < deadline, f"Slurm did not start{cluster.logs()}"
        time.sleep(0.1)


def _stop(cluster: Cluster) -> None:
    daemons = list(cluster.daemons.values())
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        _cancel_jobs(cluster)
    for daemon in reversed(daemons):
        daemon.terminate()
    for daemon in reversed(daemons):
        try:
            daemon.wait(timeout=10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
    leftovers = [process for process in psutil.process_iter() if _belongs_to(process, cluster)]
    for process in leftovers:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(leftovers, timeout=10)


def _cancel_jobs(cluster: Cluster) -> None:
    def slurm(*command: str) -> str:
        return subprocess.run(
            command, env=cluster.environment, capture_output=True, text=True, timeout=10
        ).stdout

    for state in ("PENDING", "RUNNING"):
        slurm("scancel", f"--state={state}")
    deadline = time.monotonic() + 10
    while slurm("squeue", "--noheader").strip() and time.monotonic() < deadline:
        time.sleep(0.2)


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def _belongs_to(process: psutil.Process, cluster: Cluster) -> bool:
    """Return whether the process belongs to a job of this cluster, or is its slurmstepd, which
    clears its environment but has a log file in the cluster's folder."""
    try:
        if process.environ().get("SLURM_CONF") == cluster.environment["SLURM_CONF"]:
            return True
        return process.name() == "slurmstepd" and any(
            open_file.path.startswith(f"{cluster.folder}/") for open_file in process.open_files()
        )
    except (psutil.Error, OSError):
        return False


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


if __name__ == "__main__":
    reason = missing_requirement()
    if reason is not None:
        raise SystemExit(f"cannot run Slurm on this machine: {reason}")
    with start_slurm_cluster() as running:
        print(f"export SLURM_CONF={running.environment['SLURM_CONF']}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
