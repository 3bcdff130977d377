"""Whether a communication method pays off on the measured link: the estimates, training steps over
fast and slow links, and the reports."""

import time
from dataclasses import asdict

import pytest
import torch
from links import SlowCommunicator
from ranks import run_ranks
from torch import nn
from torch.nn import functional

from paceline.config.schema import Config
from paceline.distributed.link import Link
from paceline.distributed.mesh import ParallelDims
from paceline.models.shape.outline import outline
from paceline.observe.comm_advisor import CommAdvisor, StepTimings, evaluate, evaluate_plain_ddp
from paceline.observe.console import end_lines
from paceline.observe.metrics import StepMetrics
from paceline.observe.report.tables import communication_rows
from paceline.observe.terminal import RunProgress
from paceline.parallel.comm_profile import CommProfile, CommTimes
from paceline.parallel.strategy import make_strategy
from paceline.train.optimizers.build import build_optimizer, matrices_of

FAST, SLOW = Link(1e-4, 1e9, 2), Link(0.01, 1e7, 2)
BUCKETS = [20_000_000, 20_000_000]  # with two ranks, each byte is sent once


def evaluate_topk(link, measured, in_background=True, sends_s=None):
    profile = CommProfile(
        "topk", "leave `compression` out", BUCKETS, None, None, 0.0, 0.0, CommTimes, in_background
    )
    return evaluate(profile, sends_s, link, measured)


def test_pays_if_plain_ddp_would_wait_longer():
    verdict = evaluate_topk(SLOW, StepTimings(20, 0.5, 0.2, 0.3, CommTimes(0.2, method_s=0.1)))
    assert verdict.pays is True
    # The first bucket is ready after half of the backward pass, and each all-reduce takes 2.02 s.
    assert verdict.ddp == pytest.approx({"all_reduce_s": 4.04, "wait_s": 3.94, "step_s": 4.24})
    assert "a plain ddp step would take about 4.2 s" in verdict.why
    assert "38.1 MiB" in verdict.why
    assert "hides 100 ms" in verdict.why


def test_does_not_pay_if_backward_hides_communication():
    verdict = evaluate_topk(FAST, StepTimings(20, 0.35, 0.05, 0.3, CommTimes(0.2, method_s=0.04)))
    assert verdict.pays is False
    assert verdict.ddp["wait_s"] == pytest.approx(0.0202)  # only the last bucket is not hidden
    assert verdict.ddp["step_s"] == pytest.approx(0.3202)
    assert "topk itself computes for 40 ms" in verdict.why
    assert verdict.why.endswith("Fix: leave `compression` out")


def test_small_gain_is_inconclusive():
    verdict = evaluate_topk(FAST, StepTimings(20, 0.315, 0.015, 0.3, CommTimes(0.2)))
    assert verdict.pays is None
    assert "too small to tell" in verdict.why


def test_background_work_slows_step_down():
    """With 80 ms of work and 5 ms of waiting, the step loses 75 ms on a single thread, and a third
    of that on three threads."""
    for threads, slowdown_s in ((1, 0.075), (3, 0.025)):
        verdict = evaluate_topk(
            FAST, StepTimings(20, 0.305, 0.005, 0.3, CommTimes(0.2, method_s=0.08), threads)
        )
        assert verdict.ddp["step_s"] == pytest.approx(0.3202 - slowdown_s)
    verdict = evaluate_topk(
        FAST,
        StepTimings(20, 0.305, 0.005, 0.3, CommTimes(0.2, method_s=0.08), 3),
        in_background=False,
    )
    assert verdict.ddp["step_s"] == pytest.approx(0.3202 - 0.08)  # the work is part of the step
    verdict = evaluate_topk(
        FAST, StepTimings(20, 0.305, 0.005, 0.3, CommTimes(0.2, moments_s=0.01))
    )
    assert verdict.ddp["step_s"] == pytest.approx(0.3302)  # the time of ddp's optimizer step


def test_unexplained_waiting_is_added_to_ddp_estimate():
    measured = StepTimings(20, 0.35, 0.05, 0.3, CommTimes(0.2, method_s=0.01, moments_s=0.005))
    verdict = evaluate_topk(FAST, measured, sends_s=0.002)
    assert verdict.ddp["wait_s"] == pytest.approx(0.0202 + 0.033)
    assert verdict.ddp["step_s"] == pytest.approx(0.3 + 0.005 + 0.0202 + 0.033)
    assert "33 ms of waiting that the link does not explain" in verdict.why
    assert verdict.pays is None
    assert evaluate_topk(FAST, measured).pays is False  # the time on the link is unknown
    # Work in the foreground is not part of the waiting.
    in_foreground = evaluate_topk(FAST, measured, in_background=False, sends_s=0.002)
    assert in_foreground.ddp["wait_s"] == pytest.approx(0.0202 + 0.048)
    without_excess = evaluate_topk(
        FAST, StepTimings(20, 0.35, 0.05, 0.3, CommTimes(0.2, method_s=0.045)), sends_s=0.005
    )
    assert without_excess.pays is False
    assert "does not explain" not in without_excess.why


@pytest.mark.parametrize(
    ("step_s", "pays"), [(3.0, True), (200.0, False), (4.0, None), (30.0, None)]
)
def test_bounds_decide_if_waiting_is_not_measured(step_s, pays):
    verdict = evaluate_topk(SLOW, StepTimings(20, step_s, None, None, CommTimes(0.0)))
    assert verdict.pays is pays
    assert verdict.ddp == {"all_reduce_s": pytest.approx(4.04), "wait_s": None, "step_s": None}


def test_result_is_unknown_without_steps():
    verdict = evaluate_topk(SLOW, None)
    assert verdict.pays is None
    assert "too few steps" in verdict.why


def test_advice_on_plain_ddp():
    mostly_waiting = StepTimings(20, 4.4, 4.0, 0.4, CommTimes(0.3))
    partly_waiting = StepTimings(20, 0.4, 0.19, 0.21, CommTimes(0.3))
    assert evaluate_plain_ddp(partly_waiting, None, BUCKETS) is None
    assert evaluate_plain_ddp(None, None, BUCKETS) is None
    advice = evaluate_plain_ddp(mostly_waiting, SLOW, BUCKETS)
    assert advice.startswith("communication takes 91 % of a step (4 s of 4.4 s)")
    assert "`compression.method: powersgd`" in advice
    assert "`parallel.mode: diloco`" in advice
    fast_link_advice = evaluate_plain_ddp(mostly_waiting, FAST, BUCKETS)
    assert "the link is not the bottleneck" in fast_link_advice
    assert "compression" not in fast_link_advice


# -- training steps
VOCAB_SIZE, ROWS = 24, 48


class SmallModel(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Embedding(VOCAB_SIZE, 64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, VOCAB_SIZE)
        )


def train_steps(world, mode, link, settings, num_steps=14):
    """Train ``num_steps`` steps, over a simulated link of (bytes per second, seconds per message)
    unless it is None."""
    if link is not None:
        world = SlowCommunicator.wrap(world, *link)
    parallel = {"mode": mode, "bucket_cap_mb": 0.01}
    config = Config(model="m", dataset="d", parallel=parallel, **settings)
    strategy = make_strategy(mode, config, world)
    torch.manual_seed(0)
    model = SmallModel().eval()
    _, matrices = outline(model, config), matrices_of(model)
    strategy.setup(model)
    strategy.setup_optimizer(
        lambda named: build_optimizer(config.train_args, 1e-3, named, matrices)
    )
    metrics = StepMetrics(world, time.time(), has_tokens=False)
    traffic_before = world.traffic.total
    advisor = CommAdvisor(strategy.comm_profile, world, metrics, first_step=0, last_step=num_steps)
    opening, verdicts = advisor.opening(), []
    assert world.traffic.total == traffic_before
    batch = torch.arange(ROWS) % VOCAB_SIZE

    def micro_step(number, module):
        return functional.cross_entropy(module(batch), batch, reduction="sum") / ROWS

    for step in range(1, num_steps + 1):
        metrics.begin()
        strategy.forward_backward(micro_step, 1)
        strategy.clip_grad_norm(1.0)
        strategy.optimizer_step(lambda optimizer: (optimizer.step(), True)[1])
        metrics.end(torch.zeros(()), 1.0)
        verdicts.append(advisor.after_step(step))
    figures = advisor.report()
    sent = [metrics.usual_traffic, strategy.comm_profile.sent_bytes]
    world.barrier()
    return (
        opening,
        verdicts,
        {**figures, "link": advisor.link and asdict(advisor.link)},
        advisor.summary,
        sent,
    )


SLOW_RATE = (5e4, 1e-3)  # slow enough that other load on the machine does not matter
TOPK = {"compression": {"method": "topk", "ratio": 0.01}}


@pytest.mark.alone
@pytest.mark.soak
@pytest.mark.parametrize("world_size", [2, 4])
def test_compression_pays_on_slow_link(world_size):
    ranks = run_ranks(train_steps, world_size, "ddp", SLOW_RATE, TOPK)
    opening, verdicts, figures, summary, _ = ranks[0]
    assert opening[0] == "info"
    assert opening[1].startswith("link: ")
    assert "topk sends" in opening[1]
    logged = [(step, verdict) for step, verdict in enumerate(verdicts, 1) if verdict is not None]
    assert [step for step, _ in logged] == [11]  # the first step is not measured
    assert logged[0][1][0] == "info"
    assert logged[0][1][1].startswith("step 11: topk pays on this link: ")
    assert figures["pays"] is True
    assert figures["steps_measured"] == 13
    assert figures["ddp"]["step_s"] > figures["step_s"]
    assert figures["link"]["num_ranks"] == world_size
    assert summary.startswith("topk pays on this link: ")
    # All ranks reach the same result.
    assert len({figures["why"] for _, _, figures, _, _ in ranks}) == 1


@pytest.mark.alone
@pytest.mark.soak
def test_traffic_matches_estimate():
    for settings in (TOPK, {"compression": {"method": "int8"}}, {}):
        sent, estimated = run_ranks(train_steps, 2, "ddp", None, settings, 6)[0][4]
        # The tolerance allows for the all-reduce of the gradient norm.
        assert sent == pytest.approx(estimated, abs=8), settings


@pytest.mark.alone
@pytest.mark.soak
def test_plain_ddp_on_slow_link_suggests_alternatives():
    opening, verdicts, figures, summary, _ = run_ranks(train_steps, 2, "ddp", SLOW_RATE, {}, 7)[0]
    assert opening is None
    assert verdicts == [None] * 7  # nothing is reported before the end
    assert figures["method"] == "none"
    assert figures["pays"] is None
    assert figures["wait_share"] > 0.5
    assert figures["link"]["num_ranks"] == 2
    assert summary == figures["why"]
    assert "powersgd" in summary


def train_with_diloco(world, workers):
    settings = {"local_sgd": {"sync_every": 4, "workers": workers}}
    return train_steps(world, "diloco", SLOW_RATE, settings, 15)


@pytest.mark.alone
@pytest.mark.soak
def test_local_sgd_is_measured_over_complete_periods():
    ranks = run_ranks(train_with_diloco, 4, 2)
    opening, verdicts, figures, summary, _ = ranks[0]
    assert "diloco sends" in opening[1]
    assert "on average" in opening[1]
    # three periods after the first step
    assert [step for step, verdict in enumerate(verdicts, 1) if verdict is not None] == [13]
    assert figures["steps_measured"] == 12
    assert figures["link"]["num_ranks"] == 4  # the ranks over which plain ddp would all-reduce
    assert figures["pays"] is True
    assert summary.startswith("diloco pays on this link: ")


def make_profiles(world):
    """Return the profile of compression on the data axis of a hybrid mesh, and those of modes that
    have none."""
    axes = ParallelDims(data=2, tensor=2)
    hybrid_world = type(world)(world.env, world.device, axes)
    sizes = {
        "mode": "hybrid",
        "data": 2,
        "tensor": 2,
        "tensor_plan": {"1": "colwise", "3": "rowwise"},
    }
    config = Config(model="m", dataset="d", parallel=sizes, compression={"method": "bf16"})
    strategy = make_strategy("hybrid", config, hybrid_world)
    strategy.setup(SmallModel())
    profiles = []
    for mode in ("zero1", "zero3"):
        other_strategy = make_strategy(
            mode, Config(model="m", dataset="d", parallel={"mode": mode}), world
        )
        other_strategy.setup(SmallModel())
        profiles.append(other_strategy.comm_profile)
    world.barrier()
    return (
        strategy.comm_profile.ddp_group.size,
        strategy.comm_profile.sent_bytes * 2 == sum(strategy.comm_profile.bucket_bytes),
        profiles,
    )


def test_profile_of_hybrid_mesh_covers_data_axis():
    for result in run_ranks(make_profiles, 4):
        assert result == (2, True, [None, None])


# -- reports
def test_report_and_final_console_lines_show_result():
    verdict = evaluate_topk(FAST, StepTimings(20, 0.35, 0.05, 0.3, CommTimes(0.2, method_s=0.04)))
    figures = {
        "method": "topk", "ratio_sent": 50.0, "residual_norm": 1.5, "step_s": 0.35, "wait_s": 0.05,
        "wait_share": 1 / 7, "steps_measured": 20, "method_s": 0.04, "ddp": verdict.ddp,
        "pays": verdict.pays, "why": verdict.why,
    }  # fmt: skip
    rows = {
        row.name: row.value
        for row in communication_rows({"communication": figures, "link": asdict(FAST)})
    }
    assert rows["Pays on this link"] == "no"
    assert rows["Link, measured"] == "8 Gbit/s, 0.1 ms per message"
    assert rows["of which waiting for communication"] == "50 ms (14 %)"
    assert rows["Time per step of plain ddp, predicted"] == "320 ms"
    assert rows["Sent, relative to plain ddp"] == "1/50"
    assert rows["Why"] == verdict.why
    assert communication_rows({}) == []
    old_rows = {
        row.name
        for row in communication_rows({"communication": {"method": "topk", "ratio_sent": None}})
    }
    # Reports of versions that did not measure links have only these rows.
    assert old_rows == {"Method", "Sent, relative to plain ddp"}
    lines = dict(
        end_lines(RunProgress(), {"status": "done", "step": 20, "network": "topk does not pay"})
    )
    assert lines["network"] == "topk does not pay"
    assert "network" not in dict(end_lines(RunProgress(), {"status": "done", "step": 20}))
