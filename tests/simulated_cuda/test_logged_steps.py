"""On an accelerator, the figures of a logged step are read a step later. Each step has one event,
in order, before a later evaluation, checkpoint or end, and callbacks get the figures with their
step."""

import json
from pathlib import Path

import pytest
from device_runs import train_on

pytestmark = pytest.mark.slow

CALLBACK = '''
import json
import paceline


class Recorder(paceline.Callback):
    """Records its calls, and ends the training after step 7."""

    def on_train_begin(self, info, state):
        self.file = open(f"{FOLDER}/rank-{info.rank}.jsonl", "a")

    def write(self, *values):
        self.file.write(json.dumps(values) + chr(10))
        self.file.flush()

    def on_step_end(self, result, state):
        self.write("end", state.step, result.figures.get("loss"))
        if state.step == 7:
            self.request_stop("seven steps are enough")

    def on_step_logged(self, step, figures):
        self.write("logged", step, figures["loss"])

    def on_evaluation_end(self, result, state):
        self.write("evaluation", state.step, None)

    def on_train_end(self, state):
        self.write("train end", state.step, None)
'''
FAILING = '''
import paceline


class Failing(paceline.Callback):
    """Fails on every rank after step 4, and again after this error."""

    def on_step_begin(self, state):
        if state.step == 4:
            raise ValueError("no fifth step")

    def after_error(self):
        raise ValueError("no good end")
'''
#: The events of a run with these settings, on any device.
SETTINGS = ("max_steps=8", "logging_steps=1", "eval_steps=2", "save_steps=3")
EVENTS = [
    ("step", 1), ("step", 2), ("eval", 2), ("step", 3), ("checkpoint", 3), ("step", 4), ("eval", 4),
    ("step", 5), ("step", 6), ("eval", 6), ("checkpoint", 6), ("step", 7), ("checkpoint", 7),
    ("eval", 7), ("run_end", 7),
]  # fmt: skip


@pytest.mark.parametrize("device", ["cuda", pytest.param("cpu", marks=pytest.mark.soak)])
def test_each_step_is_logged_in_order(device: str, tmp_path: Path) -> None:
    code = CALLBACK.replace("{FOLDER}", str(tmp_path))
    (tmp_path / "recorder.py").write_text(code)
    train_on(
        device, tmp_path / "run", *SETTINGS, "parallel.mode=ddp", "parallel.num_gpus=2",
        "async_save=false", "split_dataset_ratio=0.1",
        f"callbacks=[{tmp_path}/recorder.py:Recorder]",
    )  # fmt: skip
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").open()]
    kinds = {kind for kind, _ in EVENTS}
    assert [(event["type"], event["step"]) for event in events if event["type"] in kinds] == EVENTS
    losses = {event["step"]: event["loss"] for event in events if event["type"] == "step"}
    for rank in range(2):
        calls = [json.loads(line) for line in (tmp_path / f"rank-{rank}.jsonl").open()]
        logged = [call[1:] for call in calls if call[0] == "logged"]
        assert logged == [[step, losses[step]] for step in range(1, 8)]
        names = [tuple(call[:2]) for call in calls]
        for step in (2, 4, 6):
            assert names.index(("logged", step)) < names.index(("evaluation", step))
        assert names[-1] == ("train end", 7)
        ends = {step: loss for name, step, loss in calls if name == "end"}
        if device == "cpu":
            assert ends == losses
        else:  # after the first, those of the step before, if nothing waited for them meanwhile
            assert ends == {1: losses[1], 2: None, 3: None, 4: None, 5: None, 6: losses[5], 7: None}


def test_last_step_before_an_error_is_logged(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    error = train_on(
        "cuda", tmp_path / "run", "max_steps=6", "logging_steps=1", "parallel.mode=ddp",
        "parallel.num_gpus=2", f"callbacks=[{tmp_path}/failing.py:Failing]", expect=1,
    )  # fmt: skip
    assert "no fifth step" in error
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").open()]
    assert [event["step"] for event in events if event["type"] == "step"] == [1, 2, 3, 4]
    notices = [event["text"] for event in events if event["type"] == "notice"]
    assert any("Failing failed: ValueError: no good end" in text for text in notices)
