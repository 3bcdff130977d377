"""Test the search of `mode: auto` and of `paceline plan`: what it chooses, and what it leaves."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from planner.test_plan import config, write_model_config
from raised import raises_error

import paceline
from paceline.config.load import to_yaml
from paceline.core.errors import ConfigError
from paceline.launch.passes.layout import kept_settings
from paceline.planner.auto.choose import choose, eligible_layouts
from paceline.planner.auto.pick import pick
from paceline.planner.devices import find_device
from paceline.planner.machine.hardware import Machine, named_machine
from paceline.planner.micro_batch import micro_batch
from paceline.planner.model_profile import describe
from paceline.planner.search.options import parse_options
from paceline.planner.search.search import Candidate, pareto_front, search
from paceline.planner.search.space import open_space
from paceline.planner.search.trials import Trials, settings_text, with_settings


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A model of 0.3 billion parameters."""
    return write_model_config(tmp_path, layers=6)


def machine(count: int, memory_gb: float, device: str = "A100-40GB") -> Machine:
    return named_machine(find_device(device)[0], round(memory_gb * 1e9), count, "bfloat16")


def trials(model: str, on: Machine, **keys: Any) -> Trials:
    args = {"max_length": 1024, **keys.pop("train_args", {})}
    trained = config(model=model, dataset="none", train_args=args, **keys)
    trained = trained.model_copy(
        update={"train_args": trained.train_args.with_derived({"precision": "bf16-mixed"})}
    )
    return Trials(trained, describe(trained), micro_batch(trained), on)


def every_candidate(tried: Trials, count: int) -> list[Candidate]:
    """Return all set-ups, without a search."""
    space = open_space(tried)
    result = []
    for layout in eligible_layouts(tried.config, count):
        for saving in space.savings():
            for batch in space.batches(layout.axes.replicas):
                settings = {**saving.settings, **batch}
                mode = tried.estimate(layout, settings)
                if mode.cost is not None:
                    result.append(Candidate(mode, settings))
    return result


@pytest.mark.parametrize(
    "memory_gb",
    [*(pytest.param(size, marks=pytest.mark.soak) for size in (4.0, 6.0, 40.0)), 12.0],
)
def test_search_finds_what_trying_everything_finds(model: str, memory_gb: float) -> None:
    tried = trials(model, machine(4, memory_gb), train_args={"global_batch_size": 32})
    everything = [each for each in every_candidate(tried, 4) if each.mode.fits]
    searched = search(tried, eligible_layouts(tried.config, 4), "time")
    chosen = searched.chosen("time")
    assert chosen is not None
    fastest = max(each.mode.per_second for each in everything)
    assert max(each.mode.per_second for each in searched.fitting) == pytest.approx(fastest)
    assert chosen.mode.per_second >= 0.98 * fastest
    assert {each.mode.global_batch_size for each in everything} == {32}


def test_front_is_that_of_all_set_ups(model: str) -> None:
    tried = trials(model, machine(4, 12), train_args={"global_batch_size": 32})
    front = pareto_front(tried, eligible_layouts(tried.config, 4))
    for each in every_candidate(tried, 4):
        assert any(
            other.mode.total <= each.mode.total
            and other.mode.per_second >= each.mode.per_second * (1 - 1e-9)
            for other in front
        ), each.name
    sizes = [each.mode.total for each in front]
    speeds = [each.mode.per_second for each in front]
    assert sizes == sorted(sizes, reverse=True)
    assert speeds == sorted(speeds, reverse=True)


@pytest.mark.soak
def test_least_memory_and_least_cost(model: str) -> None:
    tried = trials(model, machine(4, 40), train_args={"global_batch_size": 32})
    layouts = eligible_layouts(tried.config, 4)
    chosen = search(tried, layouts, "memory").chosen("memory")
    assert chosen is not None
    smallest = min(each.mode.total for each in every_candidate(tried, 4))
    assert chosen.mode.total <= smallest / 0.98
    keys = {"model": model, "dataset": "none", "train_args": {"global_batch_size": 32}}
    cheap = paceline.plan(
        {**keys, "parallel": {"optimize_for": "cost"}}, world_size=8, device="A100-40GB"
    )
    fast = paceline.plan(keys, world_size=8, device="A100-40GB")
    assert cheap["choice"]["settings"] != fast["choice"]["settings"]
    assert cheap["choice"]["samples_per_second"] < fast["choice"]["samples_per_second"]


def test_never_changes_what_the_config_sets(model: str) -> None:
    is_set = {
        "gradient_checkpointing": "none",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
    }
    keys = {"model": model, "dataset": "none", "train_args": is_set}
    keys["parallel"] = {"cpu_offload": "none"}
    result = paceline.plan(keys, world_size=4, device="A100-40GB", budget="6GB", search=True)
    for each in [result["choice"], *result["runners_up"], *result["pareto"]]:
        if each is not None:
            assert set(each["settings"]) <= {
                "parallel.mode", "parallel.data", "parallel.shard", "parallel.tensor",
                "parallel.pipeline", "parallel.context",
            }  # fmt: skip
    open_keys = {"model": model, "dataset": "none"}
    changed = paceline.plan(open_keys, world_size=1, device="A100-40GB", budget="9GB")
    assert changed["choice"]["fits"]
    assert changed["choice"]["settings"].get("train_args.gradient_checkpointing")


@pytest.mark.soak
def test_other_results_are_proposed_and_taken_if_allowed(model: str) -> None:
    keys: dict[str, Any] = {"model": model, "dataset": "none"}
    options = {"world_size": 1, "device": "A100-40GB", "budget": "5GB"}
    result = paceline.plan(keys, **options)
    assert result["choice"] is None or "train_args.precision" not in result["choice"]["settings"]
    proposed = result["proposals"][0]
    assert proposed["settings"]["train_args.precision"] == "bf16-true"
    assert "bfloat16" in proposed["effect"]
    allowed = paceline.plan({**keys, "parallel": {"allow_lossy": True}}, **options)
    assert allowed["choice"]["settings"] == proposed["settings"]
    fixed = {**keys, "train_args": {"precision": "bf16-mixed"}, "parallel": {"allow_lossy": True}}
    chosen = paceline.plan(fixed, **options)["choice"]
    assert chosen is None or "train_args.precision" not in chosen["settings"]


def test_a_run_is_chosen_as_it_is_planned(model: str) -> None:
    """What a run gets fits where the unchanged config does not, and it says what it compared."""
    trained = config(model=model, dataset="none", train_args={"global_batch_size": 8})
    choice = pick(trained, 2, 9 * 10**9, device_type="cuda")
    assert choice.layout.world_size == 2
    assert any(remark.startswith("next: ") for remark in choice.remarks)
    assert "train_args.per_device_train_batch_size" in choice.settings or choice.settings
    size = choice.settings.get("train_args.per_device_train_batch_size", 4)
    count = choice.settings.get("train_args.gradient_accumulation_steps", 1)
    assert int(size) * int(count) * choice.layout.axes.replicas >= 8


def test_the_least_cost_may_leave_devices_unused() -> None:
    args = {"global_batch_size": 8}
    cheap = config(train_args=args, parallel={"optimize_for": "cost"})
    choice = pick(cheap, 2, 8 * 10**9, device_type="cpu")
    assert choice.layout.world_size == 1
    assert choice.settings["parallel.num_gpus"] == 1
    fixed = config(train_args=args, parallel={"optimize_for": "cost", "num_gpus": 2})
    assert pick(fixed, 2, 8 * 10**9, device_type="cpu").layout.world_size == 2


@pytest.mark.soak
def test_finds_the_cheapest_machine(model: str) -> None:
    args = {"max_steps": 10_000, "global_batch_size": 64}
    keys = {"model": model, "dataset": "none", "train_args": args}
    prices = ["A100-40GB=1.5", "T4=0.4", "H100-SXM=3"]
    free = paceline.plan(keys, device="A100-40GB", price=prices)["machines"]
    assert {offer["device"] for offer in free} == {"A100-40GB", "T4", "H100-SXM"}
    assert [offer["price"] for offer in free] == sorted(offer["price"] for offer in free)
    deadline_s = min(offer["run_time_s"] for offer in free) / 3
    text = f"{deadline_s:.0f}s"
    urgent = paceline.plan(keys, device="A100-40GB", price=prices, deadline=text)["machines"]
    assert all(offer["run_time_s"] <= deadline_s for offer in urgent)
    assert urgent[0]["price"] >= free[0]["price"]
    assert all(offer["num_devices"] > 1 for offer in urgent)
    for offer in free:
        hours = offer["num_devices"] * offer["run_time_s"] / 3600
        assert offer["device_hours"] == pytest.approx(hours)
    without = {"model": model, "dataset": "none"}
    with pytest.raises(ConfigError, match="length of the run is not known"):
        paceline.plan(without, device="A100-40GB", deadline="8h")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"deadline": "8"}, ("invalid-time", "--deadline 8")),
        ({"deadline": "0h"}, ("invalid-time", "--deadline 0h")),
        ({"budget": "24"}, ("missing-unit", "")),
        ({"prices": ["-1"]}, ("invalid-price", "--price -1")),
        ({"prices": ["H1000=2"]}, ("unknown-device", "")),
    ],
)
def test_reports_invalid_options(options: dict[str, Any], error: tuple[str, str]) -> None:
    with raises_error(ConfigError, code=error[0], naming=error[1]):
        parse_options(**options)


def test_settings_are_shown_as_overrides() -> None:
    settings = {"train_args.gradient_checkpointing": "full", "parallel.cpu_offload": "optimizer"}
    assert settings_text(settings) == "gradient_checkpointing=full parallel.cpu_offload=optimizer"


@pytest.mark.soak
@pytest.mark.slow
def test_a_run_uses_and_records_what_auto_chooses(tmp_path: Path) -> None:
    keys: dict[str, Any] = {
        "model": "builtin:qwen2-micro",
        "dataset": "builtin:python-docs#64",
        "output_dir": str(tmp_path / "run"),
        "train_args": {"global_batch_size": 16, "max_steps": 2, "max_length": 64},
        "parallel": {"device": "cpu", "num_gpus": 2},
    }
    report = paceline.train(keys)
    assert report["samples_seen"] == 32
    # `load_config` would leave the chosen sizes open.
    stored = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    args = stored["train_args"]
    assert stored["parallel"]["mode"] != "auto"
    assert args["global_batch_size"] == 16
    assert args["per_device_train_batch_size"] * args["gradient_accumulation_steps"] * 2 == 16
    # The same run again is complete.
    assert paceline.train(keys)["samples_seen"] == 32
    with pytest.raises(ConfigError, match="global batch of 16 samples"):
        paceline.train({**keys, "train_args": {**keys["train_args"], "global_batch_size": 8}})


def test_a_run_that_resumes_keeps_what_was_chosen(tmp_path: Path) -> None:
    chosen = {
        "train_args.gradient_checkpointing": "full",
        "train_args.per_device_train_batch_size": 2,
        "compression.method": "bf16",
    }
    resumed = config(output_dir=str(tmp_path))
    stored = with_settings(resumed, {**chosen, "train_args.precision": "32"})
    (tmp_path / "config.yaml").write_text(to_yaml(stored))
    # Precision follows from the devices, which may have changed.
    assert kept_settings(resumed) == chosen
    is_set = config(output_dir=str(tmp_path), train_args={"gradient_checkpointing": "none"})
    assert "train_args.gradient_checkpointing" not in kept_settings(is_set)
    assert kept_settings(config(output_dir=str(tmp_path), resume="never")) == {}
    assert kept_settings(config(output_dir=str(tmp_path / "new"))) == {}


def test_reason_for_the_choice_agrees_with_the_next_best(model: str) -> None:
    """A mode is not called the fastest beside one that is faster but less simple."""
    reasons = set()
    for memory_gb in (4.0, 12.0):
        tried = trials(model, machine(4, memory_gb), train_args={"global_batch_size": 32})
        choice = choose(
            tried.config, describe(tried.config), micro_batch(tried.config), tried.machine
        )
        is_slower = any("faster" in remark for remark in choice.remarks)
        expected = "the simplest within 2% of the fastest" if is_slower else "is the fastest"
        assert expected in choice.why
        reasons.add(expected)
    assert len(reasons) == 2
