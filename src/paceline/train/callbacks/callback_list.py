"""The callbacks of a run: calls them, and collects their requests and their state."""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import JsonValue

from paceline.core.errors import PacelineError, RunError
from paceline.core.events import StepFigures
from paceline.core.user_code import user_error
from paceline.distributed.communicator import Communicator
from paceline.distributed.traffic import uncounted
from paceline.train.callbacks.base import Callback, Requests, TrainingInfo
from paceline.train.evaluation import EvalResult
from paceline.train.state import StepResult, TrainState

logger = logging.getLogger(__name__)

#: The state of callbacks in a checkpoint, by name.
States = Mapping[str, Mapping[str, JsonValue]]
C = TypeVar("C", bound=Callback)


class CallbackList:
    """Calls the methods of several callbacks in order; see
    :class:`~paceline.train.callbacks.base.Callback`.

    Args:
        states: states in the checkpoint that the run resumes from.
        own: Paceline's callbacks, in their order. Their names are the names of their classes.
        users: callbacks of the user by name, which follow Paceline's. Their requests may differ
            between ranks.
    """

    def __init__(
        self,
        comm: Communicator,
        info: TrainingInfo,
        states: States,
        own: Sequence[Callback],
        users: Mapping[str, Callback],
    ) -> None:
        self.comm = comm
        self.info = info
        self._user_names = set(users)
        self._callbacks = {**{type(callback).__name__: callback for callback in own}, **users}
        for name in self._callbacks:
            if name in states:
                self._call("load_state_dict", states[name], names=[name])

    def find(self, kind: type[C]) -> C | None:
        """Return Paceline's callback of a class; None if the run does not have it."""
        callback = self._callbacks.get(kind.__name__)
        return callback if isinstance(callback, kind) else None

    def load_states(self, states: States) -> None:
        """Restore the states of a checkpoint."""
        for name in self._callbacks:
            self._call("load_state_dict", states.get(name, {}), names=[name])

    def states(self) -> dict[str, dict[str, JsonValue]]:
        """Return the states to store in a checkpoint. Callbacks without state are left out.

        Raises:
            RunError: if the state of a callback is not JSON.
        """
        states: dict[str, dict[str, JsonValue]] = {}
        for name in self._callbacks:
            try:
                state = json.loads(json.dumps(self._call("state_dict", names=[name])))
            except (TypeError, ValueError) as error:
                raise RunError(
                    "the state of the callback {name} is not JSON: {reason}",
                    code="callback-state-not-json",
                    name=name,
                    reason=error,
                ) from error
            if state:
                states[name] = state
        return states

    def take_requests(self) -> Requests:
        """Return what the callbacks have requested since the last call. A request of any rank
        counts on all ranks. A collective, if there are callbacks of the user."""
        taken = Requests()
        for callback in self._callbacks.values():
            taken |= callback.requests
            callback.requests = Requests()
        if not self._user_names:  # the others request the same on every rank
            return taken
        with uncounted():
            flags = self.comm.sum(float(bool(taken.stop)), float(taken.evaluate), float(taken.save))
            is_stopped, evaluate, save = (flag > 0 for flag in flags)
            reasons = self.comm.gather_objects(taken.stop) if is_stopped else []
        return Requests(next(filter(None, reasons), None), evaluate, save)

    def on_train_begin(self, state: TrainState) -> None:
        self._call("on_train_begin", self.info, state)

    def on_step_begin(self, state: TrainState) -> None:
        self._call("on_step_begin", state)

    def on_step_end(self, result: StepResult, state: TrainState) -> None:
        self._call("on_step_end", result, state)

    def on_step_logged(self, step: int, figures: StepFigures) -> None:
        self._call("on_step_logged", step, figures)

    def before_pause(self, state: TrainState) -> None:
        self._call("before_pause", state)

    def on_evaluation_end(self, result: EvalResult, state: TrainState) -> None:
        self._call("on_evaluation_end", result, state)

    def before_checkpoint(self, state: TrainState) -> None:
        self._call("before_checkpoint", state)

    def on_checkpoint_saved(self, step: int, path: Path) -> None:
        self._call("on_checkpoint_saved", step, path)

    def on_train_end(self, state: TrainState) -> None:
        self._call("on_train_end", state)

    def after_error(self) -> None:
        """Call the hook of each callback. Its errors are logged: the run has one already."""
        for name in self._callbacks:
            try:
                self._call("after_error", names=[name])
            except Exception as error:
                logger.warning(f"after the error: {error}")

    def _call(self, hook: str, *args: object, names: Iterable[str] | None = None) -> object:
        """Call a method of the callbacks with these names, by default of all, and return what the
        last one returned."""
        result: object = None
        for name in self._callbacks if names is None else names:
            try:
                result = getattr(self._callbacks[name], hook)(*args)
            except (PacelineError, RuntimeError, OSError):  # may be the fault of another rank
                raise
            except Exception as error:
                if name not in self._user_names:
                    raise
                text = f"{hook} of the callback {name} failed"
                raise RunError(user_error(text, error).what, code="callback-failed") from error
        return result
