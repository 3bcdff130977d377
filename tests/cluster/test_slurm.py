"""Test the script of `paceline slurm` and the errors for invalid options.

tests/slurm has the tests on a real Slurm cluster.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from commands import events, report, run, start, wait_for_step
from slow_task import SLOW

from paceline.cli import main
from paceline.config.load import load_config
from paceline.config.overrides import split_cli
from paceline.distributed.environment import slurm_port

OPTIONS = ("--nodes", "2", "--gpus-per-node", "8", "--time", "4:00:00")

RunSlurm = Callable[..., str]


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "config.yaml").write_text(
        "model: builtin:qwen2-micro\ndataset: builtin:python-docs#64\n"
    )
    return folder


@pytest.fixture
def write_script(workdir: Path, capsys: pytest.CaptureFixture[str]) -> RunSlurm:
    def write(*args: str) -> str:
        assert main(["slurm", *args]) == 0
        return capsys.readouterr().out

    return write


@pytest.fixture
def expect_error(workdir: Path, capsys: pytest.CaptureFixture[str]) -> RunSlurm:
    def check(*args: str) -> str:
        before = sorted(workdir.iterdir())
        assert main(["slurm", *args]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1, err
        assert sorted(workdir.iterdir()) == before, "a file was written"
        return err

    return check


def parse_options(script: str) -> dict[str, str]:
    """Return the `#SBATCH` options of a script."""
    lines = [
        shlex.split(line.removeprefix("#SBATCH "))[0]
        for line in script.splitlines()
        if line.startswith("#SBATCH ")
    ]
    return {
        name.removeprefix("--"): value for name, _, value in (line.partition("=") for line in lines)
    }


def parse_command(script: str) -> list[str]:
    """Return the arguments of `paceline sft` in a script."""
    line = script[script.index("\nsrun ") : script.index("\ncode=$?")].replace("\\\n", " ")
    args = shlex.split(line)
    return args[args.index("sft") + 1 :]


def test_script_options_and_command(workdir: Path, write_script: RunSlurm) -> None:
    script = write_script(
        "config.yaml", *OPTIONS, "system=it's me; rm -rf $HOME", "parallel.mode=zero3"
    )
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert parse_options(script) == {
        "job-name": "config", "nodes": "2", "ntasks-per-node": "1", "cpus-per-task": "16",
        "gpus-per-node": "8", "time": "4:00:00", "chdir": str(workdir), "output": "%x-%j.log",
        "open-mode": "append", "requeue": "", "signal": "TERM@120",
    }  # fmt: skip
    args = parse_command(script)
    assert args[0] == str(workdir / "config.yaml")
    assert args[-1] == "parallel.rdzv_endpoint=$address:$port"
    config = load_config(*split_cli([*args[:-1], "parallel.rdzv_endpoint=10.0.0.1:20042"])).config
    assert config.system == "it's me; rm -rf $HOME"
    assert (config.parallel.mode, config.parallel.nnodes, config.parallel.num_gpus) == (
        "zero3",
        2,
        8,
    )
    assert f"{shlex.quote(sys.executable)} -m paceline sft" in script


def test_endpoint_is_first_node_with_port_from_job_id(
    write_script: RunSlurm, tmp_path: Path
) -> None:
    """Run the script's lines in bash with a fake `scontrol` that prints what Slurm prints."""
    script = write_script("config.yaml", *OPTIONS)
    lines = script[script.index("first=$(") : script.index("\nsrun ")]
    fake_scontrol = """scontrol() { case "$2" in
      hostnames) printf 'gpu003\\ngpu004\\n';;
      node) echo "NodeName=$4 Arch=x86_64 CoresPerSocket=1 NodeAddr=10.0.0.3" \\
        "NodeHostName=gpu003 Version=22.05.8";;
    esac; }\n"""
    done = subprocess.run(
        ["bash", "-uc", f'{fake_scontrol}{lines}\necho "$address:$port"'],
        capture_output=True,
        text=True,
        env={
            "PATH": "/usr/bin:/bin",
            "SLURM_JOB_ID": "1234567",
            "SLURM_JOB_NODELIST": "gpu[003-004]",
        },
    )
    assert done.stdout == f"10.0.0.3:{slurm_port(1234567)}\n", done.stderr


@pytest.fixture
def run_script(workdir: Path, write_script: RunSlurm) -> Callable[[int], tuple[int, bool, str]]:
    """Return a function that runs the script with a fake srun that exits with a given code. It
    returns the script's exit code, whether it requeued the job, and its output."""
    script = write_script("config.yaml", *OPTIONS, "recovery.max_restarts=2")
    for name, line in (
        ("srun", "exit $SRUN_CODE"),
        ("scontrol", '[ "$1" = requeue ] && echo "$@" >> requeued; echo node1'),
    ):
        (workdir / name).write_text(f"#!/bin/bash\n{line}\n")
        (workdir / name).chmod(0o755)

    def run_with(code: int) -> tuple[int, bool, str]:
        (workdir / "requeued").unlink(missing_ok=True)
        environment = {
            "PATH": f"{workdir}:/usr/bin:/bin",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NAME": "config",
            "SRUN_CODE": str(code),
        }
        done = subprocess.run(
            ["bash", "-s"],
            input=script,
            env=environment,
            capture_output=True,
            text=True,
            cwd=workdir,
        )
        assert done.stderr == ""
        return done.returncode, (workdir / "requeued").exists(), done.stdout

    return run_with


@pytest.mark.parametrize(
    ("code", "requeued"),
    [(0, False), (1, False), (2, False), (253, False), (143, True), (137, True)],
)
def test_requeue_depends_on_exit_code(run_script: Callable, code: int, requeued: bool) -> None:
    assert run_script(code)[:2] == (code, requeued)


def test_repeatedly_killed_job_is_not_requeued_forever(workdir: Path, run_script: Callable) -> None:
    """The limit is `recovery.max_restarts` times without a new checkpoint. Stops by SIGTERM in
    between do not count."""
    assert [run_script(code)[1] for code in (137, 143, 139, 137)] == [True, True, True, False]
    (workdir / "output/run/checkpoints/step-00000040").mkdir(parents=True)
    code, requeued, out = run_script(137)
    assert (code, requeued) == (137, True)
    assert (
        "killed on a node by signal 9 (time 1 of 2 without a new checkpoint): job 7 goes back into"
        " the queue" in out
    )
    assert [run_script(137)[1], run_script(137)[1]] == [True, False]


def test_rejoin_timeout_default_and_override(write_script: RunSlurm) -> None:
    assert "recovery.rejoin_timeout_s=60" in parse_command(write_script("config.yaml", *OPTIONS))
    chosen = parse_command(write_script("config.yaml", *OPTIONS, "recovery.rejoin_timeout_s=300"))
    assert [override for override in chosen if "rejoin_timeout_s" in override] == [
        "recovery.rejoin_timeout_s=300"
    ]


def test_cpu_ranks_on_single_node(write_script: RunSlurm) -> None:
    script = write_script(
        "config.yaml",
        "--nodes=1",
        "--gpus-per-node=0",
        "--time=1-0",
        "parallel.num_gpus=3",
        "dataloader_num_workers=2",
    )
    assert "gpus-per-node" not in script
    assert "rdzv_endpoint" not in script
    assert "rejoin_timeout_s" not in script
    assert parse_options(script)["cpus-per-task"] == "9"
    config = load_config(*split_cli(parse_command(script))).config
    assert (config.parallel.device, config.parallel.num_gpus, config.parallel.nnodes) == (
        "cpu",
        3,
        1,
    )


def test_passes_options_to_slurm(write_script: RunSlurm) -> None:
    extra_args = (
        "--partition",
        "long",
        "--account=ada",
        "--qos",
        "high",
        "--mem",
        "64G",
        "--constraint",
        "a100&ib",
        "--job-name",
        "run-7",
    )
    result = parse_options(
        write_script(
            "config.yaml", *OPTIONS, *extra_args, "--cpus-per-node", "32", "--grace-period", "300"
        )
    )
    expected = {
        "partition": "long",
        "account": "ada",
        "qos": "high",
        "mem": "64G",
        "constraint": "a100&ib",
        "job-name": "run-7",
    }
    assert expected.items() <= result.items()
    assert result["cpus-per-task"] == "32"
    assert result["signal"] == "TERM@300"


def test_job_name_is_sanitized(workdir: Path, write_script: RunSlurm) -> None:
    (workdir / "config.yaml").rename(workdir / "my run (2).yaml")
    assert parse_options(write_script("my run (2).yaml", *OPTIONS))["job-name"] == "my-run-2-"


def test_elastic_nnodes_range_is_kept(write_script: RunSlurm) -> None:
    script = write_script("config.yaml", *OPTIONS, "parallel.nnodes=1:4")
    assert "parallel.nnodes=2" not in script
    assert load_config(*split_cli(parse_command(script)[:-1])).config.parallel.hosts == (1, 4)


def test_output_file_and_json(workdir: Path, write_script: RunSlurm) -> None:
    result = json.loads(write_script("config.yaml", *OPTIONS, "--output", "job.sh", "--json"))
    assert result == {"script": (workdir / "job.sh").read_text(), "path": "job.sh", "job_id": None}
    assert write_script("config.yaml", *OPTIONS, "--output", "job.sh") == ""
    assert write_script("config.yaml", *OPTIONS) == result["script"]


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--nodes", "2", "--time", "4"], ["needs `--gpus-per-node`", "--gpus-per-node 8"]),
        (["--nodes", "0", *OPTIONS[2:]], ["`--nodes 0`", "Allowed: 1 to"]),
        (["--nodes", "two", *OPTIONS[2:]], ["`--nodes two`", "is not an integer"]),
        ([*OPTIONS[:2], "--gpus-per-node", "-1", *OPTIONS[4:]], ["`--gpus-per-node -1`"]),
        ([*OPTIONS[:4], "--time", "4h"], ["`--time 4h`", "hours:minutes:seconds"]),
        ([*OPTIONS[:4], "--time", "0"], ["`--time 0`"]),
        ([*OPTIONS[:4], "--time", "4:61:00"], ["`--time 4:61:00`"]),
        ([*OPTIONS[:4], "--time", "1-2-3"], ["`--time 1-2-3`"]),
        ([*OPTIONS[:4], "--time", "2"], ["`--grace-period 120`", "1 to 119"]),
        ([*OPTIONS, "--partiton", "long"], ["`--partiton`", "`--partition`"]),
        ([*OPTIONS, "--gres", "gpu:8"], ["`--gres`", "paceline slurm"]),
        ([*OPTIONS, "--partition", "a b"], ["`--partition a b`"]),
        ([*OPTIONS, "--partition", "--json"], ["`--partition` needs a value"]),
        ([*OPTIONS, "--job-name", "x\n#SBATCH --evil"], ["--job-name"]),
        ([*OPTIONS, "--output", "no/such/folder.sh"], ["no/such/folder.sh"]),
        ([*OPTIONS, "modle=x"], ["`modle`", "`model`"]),
        (
            [*OPTIONS, "parallel.mode=tensor", "parallel.tensor=3"],
            ["2 hosts × 8 ranks", "parallel.tensor: 3", "`--nodes`"],
        ),
        ([*OPTIONS, "parallel.mode=single"], ["`parallel.mode: single`", "`--nodes 2`"]),
        ([*OPTIONS, "parallel.nnodes=4"], ["`--nodes 2`", "`parallel.nnodes: 4`"]),
        ([*OPTIONS, "parallel.num_gpus=4"], ["`--gpus-per-node 8`", "`parallel.num_gpus: 4`"]),
        ([*OPTIONS, "parallel.device=cpu"], ["`parallel.device: cpu`", "--gpus-per-node 0"]),
    ],
)
def test_rejects_invalid_options(expect_error: RunSlurm, args: list[str], parts: list[str]) -> None:
    text = expect_error("config.yaml", *args)
    for part in parts:
        assert part in text, text


def test_submit_without_slurm_is_an_error(
    workdir: Path, expect_error: RunSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(workdir))
    text = expect_error("config.yaml", *OPTIONS, "--submit", "--output", "job.sh")
    assert "sbatch" in text
    assert "login node" in text


@pytest.mark.slow
@pytest.mark.soak
def test_signal_to_all_processes_stops_run_once(tmp_path: Path) -> None:
    """Slurm signals all processes: launcher, fork server, ranks and their loader processes."""
    folder = tmp_path / "run"
    args = (
        *SLOW,
        f"output_dir={folder}",
        "parallel.num_gpus=2",
        "save_steps=0",
        "dataloader_num_workers=2",
    )
    process = start(*args, "max_steps=400", "task_args.step_s=0.05")
    wait_for_step(folder, 5, process)
    launcher = psutil.Process(process.pid)
    processes = [launcher, *launcher.children(recursive=True)]
    for member in processes:
        os.kill(member.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert psutil.wait_procs(processes, timeout=10)[1] == []
    stopped_at = report(folder)["steps"]
    assert stopped_at == max(event["step"] for event in events(folder, "step"))
    run(*args, f"max_steps={stopped_at + 1}", "--allow-config-change")
    assert report(folder)["resumed_from_step"] == stopped_at
