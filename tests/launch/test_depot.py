"""What travels between hosts without a common folder: real ranks save through a real depot, over a link that may do harm."""

import json
import shutil
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from disks import disk
from ranks import run_ranks

from paceline.config.load import load_config
from paceline.core.errors import ConfigError
from paceline.core.events import EventLog, read_events
from paceline.core.files import sha256_file
from paceline.engine import checkpoint
from paceline.engine.carry import Carry, Lost, ask, read_frame, travel_text
from paceline.engine.checkpoint_format import MANIFEST
from paceline.engine.saver import Saver
from paceline.launch.apart import Apart, RoundOver
from paceline.launch.depot import Depot
from paceline.parallel.parts import Part
from paceline.world.group import World
from paceline.world.host import host_name

pytestmark = pytest.mark.slow

ELEMENTS = 600_000  # 1.2 MiB a rank
META = {"strategy": "made up", "world_size": 2, "config": {}}
STEPS = (1, 2)


def parts_of(step: int, rank: int, size: int) -> list[Part]:
    values = torch.arange(ELEMENTS // size, dtype=torch.float32) + step + rank
    return [Part("model/weight", values, (ELEMENTS,), (ELEMENTS // size * rank,), flat=True)]


def save_twice(world: World, folder: Path, carry: Carry) -> None:
    """Rank 1 sees no folder."""
    own = folder if world.is_first else folder / "not" / "there"
    log = EventLog(folder.parent / "events.jsonl" if world.is_first else None)
    saver = Saver(world, own, None, log, background=True, carry=replace(carry, sends=not world.is_first))
    for step in STEPS:
        saver.save(step, lambda: parts_of(step, world.rank, world.size), META, must_succeed=False)  # noqa: B023
        saver.finish()
    world.barrier()
    log.close()


@contextmanager
def depot_at(folder: Path):
    said: list[str] = []
    depot = Depot("127.0.0.1", folder, lambda _level, text: said.append(text))
    try:
        yield depot, Carry("127.0.0.1", **depot.begin_life()), said
    finally:
        depot.close()


class Link:
    """Hands bytes on between those who connect to it and ``port``. ``harm(number, count)``: of the connection's number and the
    bytes that have gone to the depot on it, what shall be done with the next ones: None, ``flip`` or ``cut``."""

    def __init__(self, port, harm):
        self.to, self.harm, self.number = port, harm, 0
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                near, _ = self.listening.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self.to))
            self.number += 1
            threading.Thread(target=self.hand_on, args=(near, far, self.number), daemon=True).start()
            threading.Thread(target=self.hand_on, args=(far, near, None), daemon=True).start()

    def hand_on(self, source, target, number):
        count, done = 0, False
        while True:
            try:
                data = bytearray(source.recv(1 << 16))
                harm = self.harm(number, count) if number is not None and data and not done else None
                if harm == "flip":
                    data[len(data) // 2] ^= 1
                    done = True
                if harm == "cut" or not data:
                    for one in (source, target) if harm else (target,):
                        one.shutdown(socket.SHUT_RDWR)
                        one.close()  # else what is on its way would wait for a reader
                    return
                target.sendall(data)
                count += len(data)
            except OSError:
                return

    def close(self):
        self.listening.close()


@contextmanager
def link_to(carry: Carry, harm):
    link = Link(carry.port, harm)
    try:
        yield replace(carry, port=link.port)
    finally:
        link.close()


def outcomes(root: Path) -> list[tuple[int, str | None]]:
    return [(one["step"], one.get("error")) for one in read_events(root / "events.jsonl") if one["type"] == "checkpoint"]


def check_whole(folder: Path, steps) -> None:
    assert sorted(one.name for one in folder.iterdir()) == [checkpoint.name_of(step) for step in steps]
    for step in steps:
        path = folder / checkpoint.name_of(step)
        assert checkpoint.verify(path) is None
        expected = torch.cat([parts_of(step, rank, 2)[0].tensor for rank in range(2)])
        assert torch.equal(checkpoint.read_state(path)["model/weight"], expected)


def test_a_part_that_travels_is_the_part_that_was_sent(tmp_path):
    folder = tmp_path / "checkpoints"
    with depot_at(folder) as (_, carry, said):
        run_ranks(save_twice, 2, folder, carry)
    check_whole(folder, STEPS)
    assert outcomes(tmp_path) == [(1, None), (2, None)]
    assert said == []


def test_a_byte_that_flips_on_the_way_is_found_and_the_part_sent_once_more(tmp_path):
    folder = tmp_path / "checkpoints"
    with (
        depot_at(folder) as (_, carry, said),
        link_to(carry, lambda number, count: number == 1 and count > 500_000 and "flip") as bad,
    ):
        run_ranks(save_twice, 2, folder, bad)
    check_whole(folder, STEPS)
    assert len(said) == 1
    assert "another SHA-256" in said[0]
    assert "(rank 1)" in said[0]


def test_a_link_that_does_harm_each_time_fails_the_save_and_no_other(tmp_path):
    folder = tmp_path / "checkpoints"
    with (
        depot_at(folder) as (_, carry, _),
        link_to(carry, lambda number, count: number > 1 and count > 500_000 and "flip") as bad,
    ):
        run_ranks(save_twice, 2, folder, bad)
    check_whole(folder, STEPS[:1])
    (_, first), (_, second) = outcomes(tmp_path)
    assert first is None
    assert "another SHA-256" in second
    assert "(on rank 1)" in second
    assert "earlier checkpoints are untouched" in second


def test_a_link_that_is_cut_fails_the_save_and_names_the_host(tmp_path):
    folder = tmp_path / "checkpoints"
    with (
        depot_at(folder) as (_, carry, _),
        link_to(carry, lambda number, count: number == 1 and count > 500_000 and "cut") as bad,
    ):
        run_ranks(save_twice, 2, folder, bad)
    check_whole(folder, STEPS[1:])
    (_, first), (_, second) = outcomes(tmp_path)
    assert f"did not come whole from host {host_name()}" in first
    assert second is None


def test_a_disk_that_is_full_on_the_head_fails_the_save_as_any_other(tmp_path):
    with disk(tmp_path / "small", "size=3m") as mounted:  # the first save and no second one
        if not mounted:
            return
        folder = tmp_path / "small" / "checkpoints"
        with depot_at(folder) as (_, carry, _):
            run_ranks(save_twice, 2, folder, carry)
        check_whole(folder, STEPS[:1])
        (_, first), (_, second) = outcomes(tmp_path / "small")
        assert first is None
        assert "No space left" in second


@pytest.mark.parametrize(
    "changed",
    [{"token": "0" * 32}, {"do": "else"}, {"step": "../../x"}, {"rank": -1}, {"rank": 5}, {"leader_pid": None}, {"step": 7}],
    ids=str,
)
def test_whoever_is_not_of_the_run_or_asks_for_what_is_not_awaited_writes_nothing(tmp_path, changed):
    folder = tmp_path / "checkpoints"
    aside = folder / ".step-00000003.17.tmp"
    aside.mkdir(parents=True)
    (aside / "rank-00001.writing").touch()
    request = {"do": "part", "step": 3, "leader_pid": 17, "rank": 1, "num_ranks": 2, "size_bytes": 4, "last": True}
    with depot_at(folder) as (_, carry, _):
        asked = {**request, **{key: value for key, value in changed.items() if key != "token"}}
        with ask(Carry(carry.address, carry.port, changed.get("token", carry.token)), **asked) as link:
            try:
                assert read_frame(link) == {"problem": "no save waits for it"}
                assert changed == {"step": 7}
            except Lost:
                assert changed != {"step": 7}
    assert sorted(one.name for one in tmp_path.rglob("*")) == sorted(["checkpoints", aside.name, "rank-00001.writing"])


# -- a checkpoint that a host fetches -----------------------------------------------------------------------------------------
@pytest.fixture
def saved(tmp_path):
    """(the head's folder of checkpoints, what the hosts are told of the one there)"""
    folder = tmp_path / "head" / "checkpoints"
    state = {"model/weight": torch.arange(400_000, dtype=torch.float32)}
    path = checkpoint.save(folder, 4, state, META).path
    return folder, {"name": path.name, "step": 4, "manifest": sha256_file(path / MANIFEST), "finished": None}


def host_of(folder: Path, say=lambda level, text: None) -> Apart:
    words = ["model=builtin:qwen2-micro", "dataset=builtin:python-docs", f"output_dir={folder}"]
    return Apart(load_config(None, words).config, "127.0.0.1:1", say)


def fetch(host: Apart, carry: Carry, told, is_over=lambda: False):
    depot = {"port": carry.port, "token": carry.token}
    return host.take(host.prepare(depot, carry.address), told, is_over).path


def test_a_checkpoint_is_fetched_whole_once_and_goes_at_the_end(tmp_path, saved):
    folder, told = saved
    with depot_at(folder) as (depot, carry, _):
        depot.offer(folder / told["name"])
        host = host_of(tmp_path / "own")
        path = fetch(host, carry, told)
        assert checkpoint.verify(path) is None
        assert checkpoint.inspect(path) == checkpoint.inspect(folder / told["name"])
        assert host.fetched["size_bytes"] == sum(one.stat().st_size for one in path.iterdir())
        assert fetch(host, carry, told) == path
        assert host.fetched is None
        state = path / "state-00000-of-00001.safetensors"
        raw = bytearray(state.read_bytes())
        raw[-1] ^= 1
        state.write_bytes(raw)  # a copy that was damaged since is fetched anew
        assert checkpoint.verify(fetch(host, carry, told)) is None
        assert host.fetched is not None
        host.leave_note()
        host.close()
    assert sorted(one.name for one in (tmp_path / "own").iterdir()) == ["elsewhere.json"]


def test_a_byte_that_flips_on_the_way_back_is_found(tmp_path, saved):
    folder, told = saved
    state = folder / told["name"] / "state-00000-of-00001.safetensors"
    raw = bytearray(state.read_bytes())
    raw[100_000] ^= 1
    state.write_bytes(raw)  # whatever harms it: what arrives is not what the manifest says
    with depot_at(folder) as (depot, carry, _):
        depot.offer(folder / told["name"])
        host = host_of(tmp_path / "own")
        with pytest.raises(ConfigError, match=f"{state.name} arrives with another SHA-256"):
            fetch(host, carry, told)
        assert not list((tmp_path / "own").rglob(told["name"]))
        host.close()


def test_a_disk_without_room_for_what_is_fetched(tmp_path, saved):
    folder, told = saved
    with disk(tmp_path / "small", "size=1m") as mounted, depot_at(folder) as (depot, carry, _):
        if not mounted:
            return
        depot.offer(folder / told["name"])
        host = host_of(tmp_path / "small" / "run")
        with pytest.raises(ConfigError, match="are free"):
            fetch(host, carry, told)
        host.close()


def test_a_fetch_ends_with_the_round_and_with_the_life(tmp_path, saved):
    folder, told = saved
    with depot_at(folder) as (depot, carry, _):
        depot.offer(folder / told["name"])
        host = host_of(tmp_path / "own")
        slow = Link(carry.port, lambda number, count: None)
        hand_on = slow.hand_on
        slow.hand_on = lambda source, target, number: (
            time.sleep(1.2) if number is None else None,
            hand_on(source, target, number),
        )
        ready = host.prepare({"port": carry.port, "token": carry.token}, carry.address)
        with pytest.raises(RoundOver):
            host.take(Carry(ready.address, slow.port, ready.token, sends=True), told, lambda: True)
        slow.close()
        depot.begin_life()  # the token of the life before is worth nothing now
        with pytest.raises(ConfigError, match="could not be fetched"):
            host.take(ready, told, lambda: False)
        host.close()


def test_a_host_with_a_run_of_its_own_that_is_further_is_refused(tmp_path, saved):
    folder, told = saved
    own = tmp_path / "own" / "checkpoints"
    shutil.copytree(folder / told["name"], own / checkpoint.name_of(9))
    with depot_at(folder) as (_, carry, _):
        host = host_of(tmp_path / "own")
        with pytest.raises(ConfigError, match="step-00000009"):
            fetch(host, carry, told)
        host.close()
        host = host_of(tmp_path / "own")
        with pytest.raises(ConfigError, match="has none"):
            fetch(host, carry, {**told, "name": None, "step": -1})
        host.close()


def test_a_way_that_is_closed_is_said_before_a_rank_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.launch.apart._PATIENCE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    host = host_of(tmp_path / "own")
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
        host.prepare({"port": port, "token": ""}, "127.0.0.1")
    host.close()


def test_what_a_save_will_cost_is_said(tmp_path):
    assert "nothing" not in travel_text([None, (10, 1e6)], 600)[1]
    assert travel_text([None, (0, 1e6)], 600)[0] == "info"
    level, text = travel_text([None, (49 << 30, 118e6), (49 << 30, None)], 600)
    assert level == "warning"
    for part in ("98.0 GiB", "save_steps", "parallel.shard", "parallel.timeout_s"):
        assert part in text
    json.dumps(text)
