"""Generate samples: answers to a few held-out prompts at each evaluation of a language model.

Decoding is greedy and draws no random numbers. Weights, gradients and the model's train/eval mode
are left unchanged, so a run with samples is identical to one without. Ranks that hold the full
weights divide the prompts among themselves. If the forward pass is a collective, all ranks process
each prompt together.
"""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.config.schema import Config
from paceline.core.event_log import EventLog
from paceline.core.events import SampleText
from paceline.core.user_code import error_summary
from paceline.data.text.tokenizer import LoadedTokenizer, load_tokenizer
from paceline.distributed.progress import ProgressTracker
from paceline.distributed.traffic import uncounted
from paceline.models import attention
from paceline.models.blocks import base_model
from paceline.parallel.protocols import checkable_replicas, evaluate
from paceline.train.callbacks import Callback
from paceline.train.evaluation import EvalResult
from paceline.train.state import TrainComponents, TrainState

#: Strategies whose forward pass is a collective of all ranks, and may have the same input on all.
_TOGETHER = ("zero2", "zero3", "tensor", "hybrid", "deepspeed")
#: Generation is cut short after this share of the evaluation time, but not before these seconds.
_MAX_SHARE, _MIN_LIMIT_S = 0.1, 5.0
#: A time above that share is reported only if it is at least this long.
_MIN_REPORTED_S = 1.0
#: Length of the prompt, in tokens, if every token of the text contributes to the loss.
_PREFIX_TOKENS = 32
#: Only the last characters of a longer prompt are logged.
_MAX_PROMPT_CHARS = 4000
_HINT = "Lower `evaluation.num_samples` (0: no samples) or `evaluation.max_new_tokens`"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Prompt:
    """A prompt. ``ids`` and ``reference`` are token ids; ``end_ids`` are those that end an
    answer."""

    ids: list[int]
    reference: list[int]
    end_ids: frozenset[int | None]


@dataclass(frozen=True)
class _Answers:
    """The answers of a rank, as token ids by prompt number. ``cut`` is true if some were cut short;
    ``error`` says why there are none."""

    ids: dict[int, list[int]]
    cut: bool = False
    error: str | None = None


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
        self.settings = config.evaluation
        self.task, self.precision = components.task, components.precision
        self.model: Any = components.model
        self.strategy = components.strategy
        self.comm = components.strategy.world
        self.dataset, self.events, self.progress = dataset, events, progress
        has_prompts = components.task.is_language_model and dataset is not None
        self.active = has_prompts and self.settings.num_samples > 0
        self._reported: set[str] = set()
        self._prompts: list[_Prompt] = []
        self._tokenizer: LoadedTokenizer
        self._generation_config: Any = None  # of the model
        # Logits of a full prompt can take more memory than a step of training.
        picks_logits = getattr(components.task, "picks_logits", False)
        self._last_logits = {"logits_to_keep": 1} if picks_logits else {}

    def on_evaluation_end(self, result: EvalResult, state: TrainState) -> None:
        """Generate samples and emit a ``sample`` event. A collective."""
        if not self.active:
            return
        reason = self._unsupported_reason()
        if reason is not None:
            self.active = False
            logger.info(
                f"no samples are generated at evaluations: {reason} (`evaluation.num_samples: 0`"
                " hides this message)"
            )
            return
        start = time.perf_counter()
        if not self._prompts:
            self._read_prompts()
        limit_s = max(_MIN_LIMIT_S, _MAX_SHARE * result.wall_s)
        answers = self._gather(self._generate(start + limit_s))
        wall_s = time.perf_counter() - start
        if answers.error is not None:
            self.active = False
            logger.info(
                "no samples are generated at evaluations: the model failed to generate"
                f" ({answers.error})"
            )
            return
        samples: list[SampleText] = [
            {
                "prompt": self._prompt_text(prompt),
                "text": self._text(answers.ids[number]),
                "reference": self._text(prompt.reference),
            }
            for number, prompt in enumerate(self._prompts)
            if number in answers.ids
        ]
        self.events.emit(
            {"type": "sample", "step": state.step, "samples": samples, "wall_s": wall_s}
        )
        if answers.cut:
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

    # -- distribution
    def _unsupported_reason(self) -> str | None:
        strategy, dims = self.strategy, self.comm.axes
        if strategy.rank0_has_full_model:
            return None
        if dims.pipeline > 1:
            return "each token would have to pass through all stages of the pipeline"
        if self.config.parallel.sequence_parallel and dims.tensor > 1:
            return "`parallel.sequence_parallel` cannot split a single token"
        if strategy.name not in _TOGETHER:
            return f"with `parallel.mode: {strategy.name}` no rank holds the full model"
        return None

    @property
    def _works_together(self) -> bool:
        """Whether all ranks process every prompt together, instead of dividing the prompts."""
        return not self.strategy.rank0_has_full_model

    def _is_local(self, number: int) -> bool:
        """Return whether this rank processes a prompt. If all ranks hold the same full weights, the
        prompts are divided among them; otherwise rank 0 processes all."""
        if self._works_together:
            return True
        replicas = checkable_replicas(self.strategy)
        has_same_weights = self.strategy.replicas_diverge or (
            replicas is not None and replicas.replica_group is self.comm
        )
        if has_same_weights:
            return number % self.comm.size == self.comm.rank
        return self.comm.is_rank_zero

    # -- prompts
    def _read_prompts(self) -> None:
        """Read the prompts, spread evenly over the validation data. They are the same at every
        evaluation."""
        assert self.dataset is not None
        assert self.task.prepared is not None
        path = Path(self.task.prepared.handle.tokenizer_path)
        self._generation_config = getattr(base_model(self.model), "generation_config", None)
        self._tokenizer = load_tokenizer(path, self.config.trust_remote_code)
        count = min(self.settings.num_samples, len(self.dataset))
        for number in range(count):
            row = self.dataset[number * len(self.dataset) // count]
            self._prompts.append(
                self._prompt(row["input_ids"].tolist(), row["labels_mask"].tolist())
            )

    def _prompt(self, ids: list[int], labels_mask: list[bool]) -> _Prompt:
        """Return the tokens before the first answer, or the first tokens if all contribute to the
        loss."""
        start = next((index for index, has_loss in enumerate(labels_mask) if has_loss), 0)
        end = next((index for index in range(start, len(ids)) if not labels_mask[index]), len(ids))
        if start < 2:
            start, end = max(1, min(_PREFIX_TOKENS, len(ids) // 2)), len(ids)
        end_ids = {self._tokenizer.eos_token_id}
        if ids[end - 1] in self._tokenizer.special_ids:
            end_ids.add(ids[end - 1])
        eos_ids = getattr(self._generation_config, "eos_token_id", None)
        end_ids |= set(eos_ids) if isinstance(eos_ids, list) else {eos_ids}
        reference = ids[start:end][: self.settings.max_new_tokens]
        return _Prompt(ids[:start], reference, frozenset(end_ids - {None}))

    def _prompt_text(self, prompt: _Prompt) -> str:
        """Return the prompt as the model sees it, with special tokens."""
        text = self._tokenizer.decode(prompt.ids)
        return text if len(text) <= _MAX_PROMPT_CHARS else f"…{text[-_MAX_PROMPT_CHARS:]}"

    def _text(self, ids: list[int]) -> str:
        special_ids = self._tokenizer.special_ids
        return self._tokenizer.decode([token for token in ids if token not in special_ids])

    # -- answers
    def _generate(self, deadline: float) -> _Answers:
        """Return this rank's answers."""
        ids: dict[int, list[int]] = {}
        is_cut = False
        was_training = self.model.training
        self.model.eval()
        try:
            with (
                torch.no_grad(),
                self.precision.autocast(),
                attention.without_packing(base_model(self.model)),
                uncounted(),
            ):
                for number, prompt in enumerate(self._prompts):
                    if self._is_local(number):
                        ids[number], is_late = self._answer(prompt, deadline)
                        is_cut = is_cut or is_late
            return _Answers(ids, is_cut)
        except Exception as error:  # a model that cannot generate can still be trained
            return _Answers({}, is_cut, error_summary(error))
        finally:
            self.model.train(was_training)

    def _answer(self, prompt: _Prompt, deadline: float) -> tuple[list[int], bool]:
        """Return the answer and whether the time ran out. Decodes greedily with the model's own
        repetition penalty, as `paceline generate` does. ``model.generate`` is not used, because
        ranks whose forward pass is a collective must stop at the same token."""
        answer: list[int] = []
        cache: Any = None
        new_ids = prompt.ids
        is_late = False
        while len(answer) < self.settings.max_new_tokens and not is_late:
            self.progress.tick()
            output = self.model(
                input_ids=torch.tensor([new_ids], device=self.comm.device),
                past_key_values=cache,
                use_cache=True,
                **self._last_logits,
            )
            cache = getattr(output, "past_key_values", None)
            scores = self._penalize([*prompt.ids, *answer], output.logits[:, -1].float())
            answer.append(int(scores.argmax()))
            new_ids = answer[-1:] if cache is not None else [*prompt.ids, *answer]
            if self._agree(answer[-1] in prompt.end_ids):
                break
            is_late = self._agree(time.perf_counter() > deadline)
        if self._works_together:
            # Releases the weights that were gathered for these forward passes.
            evaluate(self.strategy, lambda model: {}, self.model)
        return answer, is_late

    def _penalize(self, ids: list[int], scores: torch.Tensor) -> torch.Tensor:
        penalty = getattr(self._generation_config, "repetition_penalty", None)
        if penalty in (None, 1.0):
            return scores
        from transformers import RepetitionPenaltyLogitsProcessor

        processor: Any = RepetitionPenaltyLogitsProcessor(penalty)
        penalized: torch.Tensor = processor(torch.tensor([ids], device=scores.device), scores)
        return penalized

    def _agree(self, ends: bool) -> bool:
        """Return whether the argument is true on any rank that processes this prompt, so that all
        of them stop at the same token."""
        return self.comm.sum(float(ends))[0] > 0 if self._works_together else ends

    def _gather(self, local: _Answers) -> _Answers:
        by_rank: list[Any] = self.comm.gather_objects(local)
        reported: list[_Answers] = [answers for answers in by_rank if answers is not None]
        ids: dict[int, list[int]] = {}
        for answers in reversed(reported):
            ids.update(answers.ids)
        error = next((answers.error for answers in reported if answers.error is not None), None)
        return _Answers(ids, any(answers.cut for answers in reported), error)
