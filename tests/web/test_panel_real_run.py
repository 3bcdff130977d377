"""Test that the panel shows a real run while it trains and after it has finished."""

import pytest
from commands import MICRO, start
from panels import wait_until


@pytest.mark.slow
def test_shows_a_run_from_start_to_end(serve, tmp_path):
    served = serve(tmp_path)
    settings = (
        "max_steps=8",
        "logging_steps=1",
        "eval_steps=4",
        "save_steps=4",
        "split_dataset_ratio=0.1",
    )
    process = start(
        *MICRO,
        *settings,
        f"output_dir={tmp_path / 'one'}",
        "parallel.mode=ddp",
        "parallel.num_gpus=2",
    )
    try:
        statuses: set[str] = set()

        def has_ended() -> bool:
            runs = served.get("/api/runs")["runs"]
            statuses.update(run["status"] for run in runs)
            return bool(runs) and runs[0]["status"] in ("done", "failed", "lost", "stopped")

        wait_until(has_ended, timeout_s=240)
        assert process.wait(60) == 0, process.communicate()[1]
    finally:
        process.kill()
        process.communicate()
    assert "live" in statuses
    assert statuses <= {"waiting", "live", "done"}
    id = served.find_run_id()
    run = served.get(f"/api/runs/{id}")
    assert (run["status"], run["step"], run["steps"], run["problem"]) == ("done", 8, 8, None)
    assert run["loss"] == pytest.approx(run["report"]["final_train_loss"])
    assert run["eval_loss"] == pytest.approx(run["report"]["final_eval_loss"])
    assert [event["step"] for event in run["evals"]] == [4, 8]
    assert [checkpoint["exists"] for checkpoint in run["checkpoints"]] == [True, True]
    assert [rank["rank"] for rank in run["mesh"]["ranks"]] == [0, 1]
    assert (
        run["predicted"]["traffic_bytes_per_step"]
        == run["report"]["traffic_bytes_per_step"]["predicted"]
    )
    weights = pytest.approx(run["model_info"]["parameters"] * 4, rel=0.01)
    assert [rank["parameters"] for rank in run["memory"]] == [weights, weights]
    assert run["samples"]
    assert run["has"] == {
        "report_html": True,
        "model": True,
        "image_processor": False,
        "config": True,
        "completions": False,
    }
    series = served.get(f"/api/runs/{id}/series")
    assert series["step"] == list(range(1, 9))
    assert series["series"]["loss"]["mean"][0] == pytest.approx(
        run["report"]["first_train_loss"], rel=1e-6
    )
    # The peak rate of a CPU is unknown, so its share is too.
    assert set(series["series"].pop("mfu")["mean"]) == {None}
    # The model has no experts, and the run generates no completions.
    of_rollouts = ("reward", "completion_length", "entropy", "kl", "clip_ratio", "logprob_diff")
    for name in ("expert_load", "aux_loss", *of_rollouts, "importance_ratio"):
        assert set(series["series"].pop(name)["mean"]) == {None}
    for name, curve in series["series"].items():
        assert None not in curve["mean"], name
    ranks = served.get(f"/api/runs/{id}/ranks")
    for rank in ranks["ranks"]:
        parts = [
            rank[name][-1]
            for name in (
                "data_s",
                "forward_s",
                "backward_s",
                "communication_s",
                "optimizer_s",
                "other_s",
            )
        ]
        assert min(parts) >= 0
        # The logged step time is that of rank 0.
        assert rank["rank"] or sum(parts) == pytest.approx(ranks["step_time_s"][-1], rel=0.05)
        assert rank["memory_bytes"][-1] > 1 << 20
        assert (rank["host"], rank["device"]) == (run["host"], "cpu")
    traffic = served.get(f"/api/runs/{id}/traffic")
    assert sum(values[-1] or 0 for values in traffic["by_collective"].values()) == pytest.approx(
        traffic["measured_bytes"], rel=0.1
    )
    assert served.client.get(f"/api/runs/{id}/report").status_code == 200
    assert "evaluation at step 8" in "\n".join(
        line["text"] for line in served.get(f"/api/runs/{id}/log")["lines"]
    )
