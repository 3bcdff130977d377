"""Check that a model can be trained before the ranks are started, by building it with its adapters
on torch's meta device.

A dry run does this before it reads the data. Other runs do it while the data is tokenized, in a
process forked from the fork server, and stop the tokenization if the model cannot be trained. If
tokenization finishes first, the run does not wait for the check, and the ranks reject the model.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.files import Scratch, write_json_atomic
from paceline.core.log import Notice
from paceline.core.processes import end_with_parent, hidden_main
from paceline.core.stop import polling
from paceline.models.builtin import config_numbers
from paceline.models.checks.cache import StoredCheck, check_of_config
from paceline.tasks import uses_transformers

if TYPE_CHECKING:
    from paceline.parallel.registry import ParallelLayout

#: Time after which the fork server has imported the modules that a model needs.
_START_AFTER_S = 6.0


def check_model(config: Config, layout: ParallelLayout) -> list[Notice]:
    """Build a language model as the ranks will, but without weights, and return the notices that
    they would log. The result is cached if the model passes.

    Raises:
        ConfigError: if the ranks would reject the model, its adapters or its layout.
    """
    if not uses_transformers(config):
        return []
    stored = _stored(config, layout)
    if (result := stored.read()) is not None:
        return [Notice.from_json(entry) for entry in result]
    notices = _build_and_check(config, layout)
    stored.write([notice.as_json() for notice in notices])
    return notices


def _build_and_check(config: Config, layout: ParallelLayout) -> list[Notice]:
    from paceline.models.checks.step import check_adapted_step
    from paceline.models.classifiers.texts import any_text_classifier
    from paceline.models.context.model_check import check_context_model
    from paceline.models.language import language_model_on_meta
    from paceline.models.notices import model_notices
    from paceline.models.positions import check_length
    from paceline.models.transforms.activation_offloading import reduce_activations
    from paceline.models.transforms.parameters import parameter_settings
    from paceline.parallel.registry import check_model_on_mesh

    model: Any = language_model_on_meta(config, kind=any_text_classifier(config))
    check_length(config, model.config.to_dict())
    parameter_settings(model, config, 0.0)
    reduce_activations(model, config)
    if config.lora.enable:
        check_adapted_step(model)
    notices = [Notice(*entry) for entry in model_notices(model, config)]
    check_context_model(model, config, layout.axes)
    check_model_on_mesh(layout.strategy, model, config, layout.axes)
    return notices


def _stored(config: Config, layout: ParallelLayout) -> StoredCheck:
    """Return the place of the result for this model. It is not stored if Paceline cannot tell
    whether the model has changed since."""
    args, parallel = config.train_args, config.parallel
    selected = [args.freeze, args.trainable, args.trainable_layers, args.parameter_groups]
    content = config_numbers(config.model)
    if not content or config.lora.adapter is not None or any(selected):
        return StoredCheck(None)
    return check_of_config(
        "model on the meta device",
        config,
        config.task,
        content,
        args.max_length,
        [args.recomputation, parallel.offloads_activations],
        parallel.tensor_plan,
        [layout.axes.pipeline, parallel.pipeline_schedule, parallel.stages_per_rank],
        [layout.axes.tensor, parallel.sequence_parallel],
        layout.axes.context,
    )


@contextlib.contextmanager
def checking_in_background(config: Config, layout: ParallelLayout) -> Iterator[None]:
    """Check the model in another process within the block. If it cannot be trained, functions that
    poll raise the error. The fork server must have been started for this config."""
    if not uses_transformers(config):
        yield
        return
    check = _BackgroundCheck(config, layout)
    try:
        with polling(check.poll):
            yield
    finally:
        check.close()


class _BackgroundCheck:
    def __init__(self, config: Config, layout: ParallelLayout) -> None:
        self._arguments = (config, layout)
        self._start_at = time.monotonic() + _START_AFTER_S
        self._process: Any = None
        self._scratch: Scratch | None = None

    def poll(self) -> None:
        """Start the check once the fork server is ready, and raise its error.

        Raises:
            ConfigError: if the check failed; see :func:`check_model`.
        """
        if self._process is None:
            if time.monotonic() >= self._start_at:
                self._start()
            return
        assert self._scratch is not None
        outcome = self._scratch.path / "refused.json"
        if outcome.exists():
            raise ConfigError.from_record(json.loads(outcome.read_text()))

    def _start(self) -> None:
        self._scratch = Scratch()
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(
            target=_check_in_process,
            args=(*self._arguments, str(self._scratch.path / "refused.json")),
            daemon=True,
        )
        with hidden_main(), contextlib.suppress(OSError, EOFError):
            self._process.start()

    def close(self) -> None:
        if self._process is not None and self._process.pid is not None:
            self._process.kill()
            self._process.join(5.0)
        if self._scratch is not None:
            self._scratch.close()


def _check_in_process(config: Config, layout: ParallelLayout, outcome: str) -> None:
    end_with_parent()
    try:
        check_model(config, layout)
    except ConfigError as error:
        write_json_atomic(Path(outcome), error.record())
