"""Generate samples: answers to a few held-out prompts at each evaluation of a language model.

A run with samples is identical to one without (:mod:`paceline.train.answers.generation`).
"""

import logging
import time
from typing import Any

from paceline.config.schema import Config
from paceline.core.event_log import EventLog
from paceline.core.events import SampleText
from paceline.core.texts import UserText
from paceline.distributed.timing.progress import ProgressTracker
from paceline.models.kinds import reads_images
from paceline.train.answers.generation import AnswerGenerator, Prompt
from paceline.train.callbacks.base import Callback
from paceline.train.evaluation import EvalResult
from paceline.train.state import TrainComponents, TrainState

#: Generation is cut short after this share of the evaluation time, but not before these seconds.
_MAX_SHARE, _MIN_LIMIT_S = 0.1, 5.0
#: A time above that share is reported only if it is at least this long.
_MIN_REPORTED_S = 1.0
#: Only the last characters of a longer prompt are logged.
_MAX_PROMPT_CHARS = 4000
_HINT = "Lower `evaluation.num_samples` (0: no samples) or `evaluation.max_new_tokens`"

logger = logging.getLogger(__name__)


class SampleGenerator(Callback):
    """Generates samples at each evaluation.

    Args:
        dataset: evaluation set, or None.
    """

    def __init__(
        self,
        config: Config,
        components: TrainComponents,
        dataset: Any | None,
        events: EventLog,
        progress: ProgressTracker,
    ) -> None:
        self.config = config
        self.dataset, self.events = dataset, events
        has_prompts = components.task.is_language_model or reads_images(config)
        self.active = has_prompts and dataset is not None and config.evaluation.num_samples > 0
        self.generator = AnswerGenerator(
            components.task,
            components.model,
            components.strategy,
            components.precision,
            config,
            progress,
        )
        self._reported: set[str] = set()
        self._prompts: list[Prompt] = []

    def on_evaluation_end(self, result: EvalResult, state: TrainState) -> None:
        """Generate samples and emit a ``sample`` event. A collective."""
        if not self.active:
            return
        reason = self.generator.unsupported_reason()
        if reason is not None:
            self.active = False
            logger.info(
                UserText(
                    "no samples are generated at evaluations: {reason} (`evaluation.num_samples:"
                    " 0` hides this message)",
                    code="no-samples-generated",
                    reason=reason,
                )
            )
            return
        start = time.perf_counter()
        if not self._prompts:
            self._read_prompts()
        limit_s = max(_MIN_LIMIT_S, _MAX_SHARE * result.wall_s)
        answers = self.generator.generate(self._prompts, limit_s=limit_s)
        wall_s = time.perf_counter() - start
        if answers.error is not None:
            self.active = False
            logger.info(
                UserText(
                    "no samples are generated at evaluations: the model failed to generate"
                    " ({reason})",
                    code="sample-generation-failed",
                    reason=answers.error,
                )
            )
            return
        max_new_tokens = self.config.evaluation.max_new_tokens
        samples: list[SampleText] = [
            {
                "prompt": self._prompt_text(prompt),
                "text": self.generator.text(answers.ids[number]),
                "reference": self.generator.text(prompt.reference[:max_new_tokens]),
            }
            for number, prompt in enumerate(self._prompts)
            if number in answers.ids
        ]
        self.events.emit(
            {"type": "sample", "step": state.step, "samples": samples, "wall_s": wall_s}
        )
        if answers.is_cut:
            self._report_once("cut", f"samples were cut short after {limit_s:.0f} s. {_HINT}")
        elif wall_s > max(_MIN_REPORTED_S, _MAX_SHARE * result.wall_s):
            self._report_once(
                "slow",
                f"samples took {wall_s:.1f} s, and the rest of the evaluation"
                f" {result.wall_s:.1f} s. {_HINT}",
            )

    def _report_once(self, kind: str, text: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            logger.info(text)

    def _read_prompts(self) -> None:
        """Read the prompts, spread evenly over the validation data. They are the same at every
        evaluation."""
        assert self.dataset is not None
        count = min(self.config.evaluation.num_samples, len(self.dataset))
        for number in range(count):
            row = number * len(self.dataset) // count
            prompt = self.generator.first_prompt(self.dataset, row)
            if prompt is not None:
                self._prompts.append(prompt)

    def _prompt_text(self, prompt: Prompt) -> str:
        """Return the prompt as the model sees it, with special tokens."""
        text = self.generator.tokenizer.decode(prompt.ids)
        return text if len(text) <= _MAX_PROMPT_CHARS else f"…{text[-_MAX_PROMPT_CHARS:]}"
