"""Test the topics of `paceline explain` that record a training or an algorithm on real ranks: what
they show agrees with the recorded traffic and with a reference."""

import json
import statistics
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from paceline.explain.catalog import ExplainOptions
from paceline.explain.draw import draw_picture
from paceline.explain.page import render_page
from paceline.explain.record import Recording
from paceline.explain.run import record
from paceline.explain.text import render_text

pytestmark = pytest.mark.soak


def _record(topic: str, ranks: int, algorithm: str = "") -> tuple[Recording, dict[str, Any]]:
    """Record a topic, and check what holds for all of them."""
    recording = record(ExplainOptions(topic, ranks, 0, algorithm))
    assert recording.is_correct, [check for check in recording.checks if not check.passed]
    assert recording.checks
    frames = recording.frames
    assert len(frames) > 1
    assert all(len(frame.rows) == len(recording.actors) for frame in frames)
    times = [frame.time_s for frame in frames if frame.time_s is not None]
    assert times == sorted(times)
    assert bool(times) == bool(recording.spans)
    end_s = recording.end_s
    assert all(0 <= span.start_s <= span.end_s <= end_s + 1e-9 for span in recording.spans)
    text, page = render_text(recording), render_page(recording)
    assert all(frame.caption in text for frame in frames)
    assert recording.title in page
    assert ET.fromstring(draw_picture(recording)).tag.endswith("svg")
    content: dict[str, Any] = json.loads(json.dumps(recording.content()))
    assert content["topic"] == topic
    return recording, content


def test_ddp_reduces_buckets_in_backward_order() -> None:
    _, content = _record("ddp", 2)
    assert sum(content["buckets"]) == 8 * (512 * 512 + 512) * 4
    for rank in range(2):
        reduces = [
            span
            for span in content["spans"]
            if span["actor"] == rank and span["kind"] == "all-reduce"
        ]
        assert len(reduces) == len(content["buckets"])
        # With two ranks, each sends as many bytes as the bucket has.
        assert [span["size_bytes"] for span in reduces] == content["buckets"]
        for number, span in enumerate(reduces):
            fills = [
                fill
                for fill in content["fills"]
                if fill["rank"] == rank and fill["bucket"] == number
            ]
            assert sum(fill["size_bytes"] for fill in fills) == content["buckets"][number]
            # The all-reduce of a bucket starts when it is full, and before the end of backward
            # except for the last one.
            assert max(fill["time_s"] for fill in fills) <= span["start_s"]
        backward = next(
            span
            for span in content["spans"]
            if span["actor"] == rank and span["kind"] == "backward"
        )
        assert all(span["start_s"] < backward["end_s"] for span in reduces[:-1])
    assert 0 <= content["overlap"] <= 1


def test_data_parallel_runs_replicas_concurrently_between_copies() -> None:
    _, content = _record("data-parallel", 3)
    # weights to two devices, and gradients back
    assert content["copied_bytes"] == 2 * 2 * 8 * (512 * 512 + 512) * 4
    assert sum(content["bytes_sent"]) == content["copied_bytes"]
    spans: dict[str, list[dict[str, Any]]] = {}
    for span in content["spans"]:
        spans.setdefault(span["kind"], []).append(span)
    assert {span["actor"] for span in spans["forward"]} == {0, 1, 2}
    assert {span["actor"] for span in spans["backward"]} == {0, 1, 2}
    copied_s, summed_s = spans["copy weights"][0]["end_s"], spans["sum gradients"][0]["start_s"]
    assert all(copied_s <= span["start_s"] for span in spans["forward"])
    assert all(span["end_s"] <= summed_s for span in spans["backward"])
    inputs = [device["inputs"] for device in content["devices"]]
    weights = [device["weights"] for device in content["devices"]]
    assert inputs[0] != inputs[1]
    assert weights[0] == weights[1] != content["updated"]


def test_zero_measurements_match_the_predictions() -> None:
    _, content = _record("zero", 2)
    sizes = {stage["mode"]: stage["ranks"][0] for stage in content["stages"]}
    assert list(sizes) == ["ddp", "zero1", "zero2", "zero3"]
    ddp = sizes["ddp"]
    for mode, kind in (("zero1", "optimizer"), ("zero2", "gradients"), ("zero3", "parameters")):
        assert sizes[mode][kind] == pytest.approx(ddp[kind] / 2, rel=0.02)
    for stage in content["stages"]:
        for kind in ("parameters", "gradients", "optimizer"):
            assert max(rank[kind] for rank in stage["ranks"]) == pytest.approx(
                stage["declared"][kind], rel=0.02
            )
        assert stage["traffic"] == pytest.approx(stage["declared"]["traffic"], rel=0.02)
    # In units of the parameters; the rest is padding and the norm of the gradients.
    moved = [stage["moved"] for stage in content["stages"]]
    assert moved == [pytest.approx(each, rel=0.01) for each in (2, 2, 2, 3)]
    kinds = {span["kind"] for span in content["spans"]}
    assert {"all-reduce", "reduce-scatter", "all-gather"} <= kinds


@pytest.mark.parametrize("ranks", [2, 4])
def test_context_ring_sends_only_keys_that_are_needed(ranks: int) -> None:
    _, content = _record("context", ranks, "ring")
    first, second = content["samples"]
    total = (first * (first + 1) + second * (second + 1)) // 2
    assert sum(map(sum, content["pairs"])) == total
    owner = {position: rank for rank, own in enumerate(content["positions"]) for position in own}
    sent = [0] * ranks
    for step in content["steps"]:
        for send in step["sends"]:
            sent[send["from"]] += send["bytes"]
            holder = send["from"] if step["what"] == "keys" else send["to"]
            assert {owner[position] for position in send["positions"]} == {holder}
    assert sent == content["bytes_sent"]
    forward = [step for step in content["steps"] if step["phase"] == "forward"]
    assert [step["step"] for step in forward] == list(range(1, ranks))
    # Backward sends the keys again, and their gradients.
    assert sum(sent) == 3 * sum(send["bytes"] for step in forward for send in step["sends"])


def test_context_ulysses_makes_two_exchanges_forward_and_two_back() -> None:
    _, content = _record("context", 3, "ulysses")
    assert [step["phase"] for step in content["steps"]] == ["forward"] * 2 + ["backward"] * 2
    sizes = [[send["bytes"] for send in step["sends"]] for step in content["steps"]]
    assert sizes[0] == sizes[3]  # queries, keys, values, and their gradients
    assert sizes[1] == sizes[2] == [size // 3 for size in sizes[0]]


def test_sampler_repeats_or_drops_samples_but_paceline_does_not() -> None:
    _, content = _record("sampler", 3)
    assert content["num_samples"] == 10
    assert len(content["repeated"]["DistributedSampler, epoch 0"]) == 2
    assert len(content["missing"]["DistributedSampler(drop_last=True)"]) == 1
    samples = content["samples"]
    assert (
        samples["DistributedSampler, epoch 1 after set_epoch(1)"]
        != samples["DistributedSampler, epoch 0"]
    )
    for case in ("Paceline, epoch 0", "Paceline, epoch 1"):
        assert content["repeated"][case] == content["missing"][case] == []
    # Epochs are shuffled differently.
    assert samples["Paceline, epoch 0"] != samples["Paceline, epoch 1"]


def test_map_reduce_sends_each_pair_to_the_rank_of_its_word() -> None:
    _, content = _record("map-reduce", 3)
    tokens = [token for part in content["words"] for token in part]
    counts = {key: count for part in content["counts"] for key, count in part}
    assert counts == {token: tokens.count(token) for token in tokens}
    assert sum(content["bytes_sent"]) == content["shuffled_bytes"] > 0
    for rank, part in enumerate(content["counts"]):
        arrived = {key for source in content["pairs"] for key, _ in source[rank]}
        assert arrived == {key for key, _ in part}


@pytest.mark.parametrize("ranks", [2, 3])
def test_accumulation_divides_by_the_global_number_of_tokens(ranks: int) -> None:
    _, content = _record("accumulation", ranks)
    gradients = content["gradients"]
    assert gradients["right"] == pytest.approx(gradients["reference"], rel=1e-4)
    assert content["wrong_error"] > 0.05
    assert content["total_tokens"] == sum(sum(tokens) for tokens in content["tokens"])
    counts = content["frames"][3]["collectives"]
    # One float64 number; an all-reduce sends 2(N-1)/N of it.
    assert [each["sent_bytes"] for each in counts] == [round(2 * (ranks - 1) / ranks * 8)]


@pytest.mark.parametrize("ranks", [2, 7])
def test_grpo_computes_advantages_and_the_clipped_loss(ranks: int) -> None:
    _, content = _record("grpo", ranks)
    total, tokens = 0.0, 0
    for rank in range(ranks):
        rewards = content["rewards"][rank]
        mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
        advantages = [(reward - mean) / (deviation + 1e-4) for reward in rewards]
        assert content["advantages"][rank] == pytest.approx(advantages)
        ratios = iter(content["ratios"][rank])
        for completion, advantage in zip(content["completions"][rank], advantages, strict=True):
            tokens += len(completion)
            for _ in completion:
                ratio = next(ratios)
                total -= min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
    assert content["total_tokens"] == tokens
    assert content["losses"][1] == pytest.approx(total / tokens, rel=1e-4)
    assert content["losses"][1] < content["losses"][0]
    clipped = [is_clipped for part in content["clipped"] for is_clipped in part]
    assert any(clipped)
    assert not all(clipped)


def test_precision_skips_the_steps_that_overflow_on_one_rank() -> None:
    _, content = _record("precision", 2)
    assert content["rounded"]["float16"][2:] == ["inf", pytest.approx(1e-5, rel=0.01), 0.0]
    assert content["rounded"]["bfloat16"][1] == 1.0
    assert content["updated"]["bfloat16"] == 1.0
    assert content["updated"]["float32"] == pytest.approx(1.01)
    attempts = content["attempts"]
    assert [attempt["is_finite"] for attempt in attempts] == [False, True, True]
    assert [attempt["new_scale"] for attempt in attempts] == [32768.0] * 3
    overflow = attempts[0]["ranks"]
    # Only the last rank overflows, but the sum does on both.
    assert [rank["local"][2] for rank in overflow] == [32768.0, "inf"]
    assert [rank["summed"][2] for rank in overflow] == ["inf", "inf"]
    assert overflow[0]["weights"] == [1.0, 1.0, 1.0] != attempts[1]["ranks"][0]["weights"]


def test_tensor_parallel_layers_need_an_all_reduce_in_each_direction() -> None:
    _, content = _record("tensor", 3)
    collectives = [each for frame in content["frames"] for each in frame["collectives"]]
    assert [each["kind"] for each in collectives] == ["all-reduce", "all-reduce"]
    # An all-reduce of three float32 numbers sends 2(N-1)/N of them.
    assert content["bytes_sent"] == [2 * 16] * 3
    local_bytes, full_bytes = content["weights_bytes"]
    assert 3 * local_bytes == full_bytes
    outputs = [rank["output"] for rank in content["values"]]
    assert outputs[0] == outputs[1] == outputs[2]
    assert content["values"][0]["partial"] != content["values"][1]["partial"]


@pytest.mark.parametrize("ranks", [4, 8])
def test_hybrid_groups_differ_on_one_axis(ranks: int) -> None:
    _, content = _record("hybrid", ranks)
    for name, groups in content["groups"].items():
        assert sorted(rank for group in groups for rank in group) == list(range(ranks))
        assert all(len(group) == content["axes"][name] for group in groups)
    assert content["groups"]["tensor"][0] == [0, 1]
    assert content["groups"]["data"][0] == [0, 2]
    assert ("pipeline" in content["groups"]) == (ranks == 8)


@pytest.mark.parametrize("algorithm", ["topk", "randomk"])
def test_compression_keeps_what_it_does_not_send(algorithm: str) -> None:
    _, content = _record("compression", 2, algorithm)
    assert sum(content["bytes_sent"]) < 2 * content["uncompressed_bytes"]
    for rank in content["steps"]:
        residual = [0.0] * content["elements"]
        for step in rank:
            for place, gradient in enumerate(step["gradient"]):
                assert step["waiting"][place] == pytest.approx(residual[place] + gradient, abs=1e-6)
                rest = step["waiting"][place] - step["sent"][place]
                assert step["residual"][place] == pytest.approx(rest, abs=1e-6)
            assert sum(value != 0 for value in step["sent"]) <= content["sent_elements"]
            residual = step["residual"]


@pytest.mark.parametrize("algorithm", ["local_sgd", "diloco"])
def test_local_sgd_workers_drift_and_are_synchronized(algorithm: str) -> None:
    _, content = _record("local-sgd", 2, algorithm)
    first, second = content["weights"]
    equal = [a == b for a, b in zip(first, second, strict=True)]
    assert equal == [(step + 1) % content["sync_every"] == 0 for step in range(len(first))]
    assert all(drift > 0 for drift in content["drift"])
    # Four float32 weights at each of two synchronizations
    assert content["bytes_sent"] == [2 * 16] * 2
    assert content["ddp_bytes"] == 8 * 16


def test_memory_of_activations_grows_in_forward_and_is_freed_in_backward() -> None:
    _, content = _record("memory", 1)
    plain, checkpointed = content["sizes"]
    blocks = 4
    activations = [sizes["activations"] for sizes in plain]
    assert activations[: blocks + 1] == sorted(activations[: blocks + 1])
    assert activations[-1] == activations[-2] == 0
    assert max(sizes["activations"] for sizes in checkpointed) < max(activations) / 2
    # Each block stores at least its input, and the result of its first layer, of four times its
    # size: 1,024 rows of 256 and of 1,024 float32 numbers.
    assert activations[blocks] >= (blocks * 5 - 1) * 1024 * 256 * 4
    assert content["peak_bytes"][1] < content["peak_bytes"][0]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved_1f1b", "zero_bubble"])
def test_pipeline_passes_each_micro_batch_through_all_stages(schedule: str) -> None:
    _, content = _record("pipeline", 2, schedule)
    stages = 4 if schedule in ("interleaved_1f1b", "zero_bubble") else 2
    assert content["stages"] == stages
    kinds = [span["kind"] for span in content["spans"]]
    assert kinds.count("forward") == kinds.count("backward") == stages * content["micro_batches"]
    assert ("weight gradient" in kinds) == (schedule == "zero_bubble")
    # Hidden states and their gradients of each micro-batch, [128, 512] float32, cross each boundary
    # of stages.
    crossing_bytes = (stages - 1) * content["micro_batches"] * 128 * 512 * 4
    assert sum(content["bytes_sent"]) == 2 * crossing_bytes
    assert 0 <= content["bubble"] < 1


@pytest.mark.parametrize("consistency", ["sync", "async", "bounded"])
def test_parameter_server_sends_only_the_rows_of_a_batch(consistency: str) -> None:
    recording, content = _record("parameter-server", 3, consistency)
    start, end = content["table"]
    assert start != end
    versions = content["versions"]
    assert (versions[0], versions[-1]) == (start, end)
    assert len(versions) - 1 == (4 if consistency == "sync" else 2 * 4)
    for worker in content["steps"]:
        for step in worker:
            for row, value in zip(step["ids"], step["rows"], strict=True):
                assert value in [table[row] for table in versions]
            assert step["stale"] == 0 or consistency != "sync"
    for frame in content["frames"]:
        for message in frame["messages"]:
            if message["label"] == "rows":
                assert message["size_bytes"] < 4 * len(start)
    pushes = [frame for frame in recording.frames if "applied" in frame.caption]
    assert len(pushes) == 2 * 4
    if consistency == "bounded":
        assert content["staleness"] <= 1


def test_recovery_ends_with_the_digest_of_an_undisturbed_run() -> None:
    _, content = _record("recovery", 2)
    assert content["restarts"] == 1
    assert content["resumed_from_step"] == 4
    assert content["digests"][0] == content["digests"][1]
    assert len(content["losses"]) == 12
    assert "5" in content["first_losses"]
