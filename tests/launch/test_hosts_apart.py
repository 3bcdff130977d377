"""Two hosts that share no folder: two launchers on one machine, the second in a mount namespace of its own, in which another
disk lies at the place of the run's."""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import MICRO, digest, events, report, run, train, wait_for_step
from namespaces import two_hosts
from not_run import skip_loudly
from ranks import free_port
from test_hosts import THREADS, end, rank_of

pytestmark = [pytest.mark.slow, pytest.mark.alone]

SETTINGS = ("max_steps=16", "save_steps=4", "warmup_steps=3", "parallel.timeout_s=60")
LONG = ("max_steps=60", "warmup_steps=3", "parallel.timeout_s=60")


@pytest.fixture
def apart(request, tmp_path):
    """(the head's disk, the other host's)."""
    disks = [tmp_path / "disk", tmp_path / "other"]
    for one in disks:
        one.mkdir()
    done = subprocess.run(["unshare", "-m", "mount", "--bind", *map(str, reversed(disks))], capture_output=True, text=True)
    if done.returncode:
        skip_loudly(request.config, "mounts", f"with hosts that share no folder: {done.stderr.strip()}")
    return disks


def host(disk, own, port, number, *words):
    """The launcher of one host; ``own``: what lies there in the place of ``disk``."""
    place = (
        "parallel.num_gpus=1",
        "parallel.nnodes=2",
        f"parallel.rdzv_endpoint=127.0.0.1:{port}",
        f"parallel.node_rank={number}",
    )
    command = [sys.executable, "-m", "paceline", "sft", *MICRO, f"output_dir={disk / 'run'}", *SETTINGS, *place, *words]
    if own != disk:
        command = ["unshare", "-m", "sh", "-c", f"mount --bind {own} {disk} && exec {shlex.join(command)}"]
    environment = {**os.environ, **THREADS, "PACELINE_HOST": "ab"[number]}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def undisturbed(tmp_path, *words):
    folder = tmp_path / "undisturbed"
    train(folder, *SETTINGS, "parallel.num_gpus=2", *words, env={**os.environ, **THREADS})
    return digest(folder)


def files_of(disk):
    return sorted(str(one.relative_to(disk)) for one in disk.rglob("*") if one.is_file())


def check_whole(disk, other, words, tmp_path):
    """The run lies on the head, with the numbers of a run on one host; on the other host a note says so."""
    assert digest(disk / "run") == undisturbed(tmp_path, *words)
    names = [one.name for one in (disk / "run" / "checkpoints").iterdir()]
    assert [one for one in names if one.startswith(".")] == []
    assert (disk / "run" / "model" / "model.safetensors").is_file()
    assert report(disk / "run")["status"] == "done"
    assert files_of(other) == ["run/elsewhere.json"]


def test_a_rank_killed_on_each_host(apart, tmp_path):
    disk, other = apart
    port = free_port()
    hosts = [host(disk, own, port, number, "parallel.mode=zero3") for number, own in enumerate(apart)]
    wait_for_step(disk / "run", 5, hosts[0])
    rank_of(hosts[1]).kill()
    wait_for_step(disk / "run", 9, hosts[0])
    rank_of(hosts[0]).kill()
    said = [end(one) for one in hosts]
    assert report(disk / "run")["restarts"] == 2
    assert [one["hosts"] for one in events(disk / "run", "fault")] == [["b"], ["a"]]
    assert "is not the same folder on b (127.0.0.1)" in said[0]
    assert "travel to the head" in said[0]
    assert said[1].count("fetched step-") == 2
    assert any("host b (127.0.0.1) fetched step-" in one["text"] for one in events(disk / "run", "notice"))
    check_whole(disk, other, ("parallel.mode=zero3",), tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize(
    "words",
    [
        ("parallel.mode=ddp",),
        ("parallel.mode=zero3", "async_save=false"),
        ("parallel.mode=ddp", "compression.method=topk"),
        ("parallel.mode=diloco", "local_sgd.steps=4"),
    ],
    ids=lambda words: "+".join(one.partition("=")[2] for one in words),
)
def test_a_host_that_is_replaced_by_one_with_an_empty_disk(apart, tmp_path, words):
    disk = apart[0]
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    port = free_port()
    hosts = [host(disk, own, port, number, *words) for number, own in enumerate(apart)]
    wait_for_step(disk / "run", 6, hosts[0])
    launcher = hosts[1]
    launcher.kill()
    launcher.communicate()
    hosts[1] = host(disk, fresh, port, 1, *words)
    said = [end(one) for one in hosts]
    assert "host b (127.0.0.1)" in said[0]
    assert "fetched step-" in said[1]
    check_whole(disk, fresh, words, tmp_path)


@pytest.mark.soak
def test_a_head_whose_launcher_dies_and_is_started_again(apart, tmp_path):
    disk, other = apart
    port = free_port()
    hosts = [host(disk, own, port, number, "parallel.mode=zero3") for number, own in enumerate(apart)]
    wait_for_step(disk / "run", 6, hosts[0])
    hosts[0].kill()
    hosts[0].communicate()
    hosts[0] = host(disk, disk, port, 0, "parallel.mode=zero3")
    said = [end(one) for one in hosts]
    assert "cut off from the head" in said[1]
    assert "fetched step-" in said[1]
    check_whole(disk, other, ("parallel.mode=zero3",), tmp_path)


@pytest.mark.soak
def test_a_run_that_is_stopped_goes_on_and_on_one_host_too(apart, tmp_path):
    disk, _other = apart
    for stop in (True, False):
        port = free_port()
        hosts = [host(disk, own, port, number, "parallel.mode=zero3") for number, own in enumerate(apart)]
        if stop:
            wait_for_step(disk / "run", 6, hosts[0])
            hosts[1].terminate()
        said = [end(one, expect=143 if stop else 0) for one in hosts]
    assert "fetched step-" in said[1]
    assert digest(disk / "run") == undisturbed(tmp_path, "parallel.mode=zero3")
    again = [host(disk, own, port, number, "parallel.mode=zero3") for number, own in enumerate(apart)]
    assert all("done already" in end(one) for one in again)
    train(disk / "run", *SETTINGS, "parallel.num_gpus=1", "parallel.mode=zero3")  # it is a run like any other


def test_a_run_is_not_begun_anew_where_it_took_part_only(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "elsewhere.json").write_text('{"head": "10.0.0.1:29500"}')
    done = run(*MICRO, f"output_dir={tmp_path / 'run'}", expect=2)
    assert "a run that lies on its head, 10.0.0.1:29500" in done.stderr
    assert "To fix" in done.stderr


@pytest.mark.soak
def test_a_host_that_is_cut_off_comes_back(request, apart, tmp_path):
    """Two network namespaces with a link between them, and a disk for each."""
    disk, other = apart
    words = ("parallel.mode=zero3", "save_steps=2")
    with two_hosts(request.config) as network:
        place = ("parallel.num_gpus=1", "parallel.nnodes=2", f"parallel.rdzv_endpoint={network.addresses[0]}")
        hosts = []
        for number, name in enumerate(network.hosts):
            command = [sys.executable, "-m", "paceline", "sft", *MICRO, f"output_dir={disk / 'run'}", *LONG, *place, *words]
            if number == 1:
                command = ["unshare", "-m", "sh", "-c", f"mount --bind {other} {disk} && exec {shlex.join(command)}"]
            environment = {**os.environ, **THREADS, "PACELINE_HOST": "ab"[number]}
            settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            hosts.append(subprocess.Popen(["ip", "netns", "exec", name, *command], env=environment, **settings))
        wait_for_step(disk / "run", 6, hosts[0])
        link = ["ip", "-n", network.switch, "link", "set", "p1"]
        subprocess.run([*link, "down"], check=True)
        time.sleep(15)
        subprocess.run([*link, "up"], check=True)
        said = [end(one) for one in hosts]
    assert "cut off from the head" in said[1]
    assert "fetched step-" in said[1]
    assert report(disk / "run")["status"] == "done"
    reference = tmp_path / "reference"
    train(reference, *LONG, "parallel.num_gpus=2", *words, env={**os.environ, **THREADS})
    assert digest(disk / "run") == digest(reference)
