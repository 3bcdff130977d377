"""What the model says by now: answers to a few held-out prompts at each evaluation of a language
task.

Decoding is greedy and takes no random number; weights, gradients and the mode of the model are left
as they were, so a run with samples is the run without. Ranks that hold whole weights share the
prompts. Where a forward is a collective all ranks work on each prompt together.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.config.schema import Config
from paceline.core.event_log import EventLog
from paceline.core.events import SampleText
from paceline.data.text.tokenizer import LoadedTokenizer, load_tokenizer
from paceline.distributed.progress import PROGRESS
from paceline.distributed.traffic import uncounted
from paceline.models import attention
from paceline.models.blocks import base_model
from paceline.parallel.base import Strategy
from paceline.parallel.protocols import checkable_replicas, evaluate
from paceline.tasks.base import Task
from paceline.train.callbacks import Callback
from paceline.train.evaluation import EvalResult
from paceline.train.precision import Precision
from paceline.train.state import TrainState

#: Strategies whose forward all ranks run together, on the same input where they are given the same.
_TOGETHER = ("zero2", "zero3", "tensor", "hybrid", "deepspeed")
#: A share of an evaluation. All answers may take that, or a few seconds where it is short; then
#: they are cut short.
_SHARE, _LIMIT_S = 0.1, 5.0
#: From that share on, and no less than this, it is worth a word what they take.
_MUCH_S = 1.0
#: Of a prompt whose every token carries loss, so much is given. A prompt is told by its last
#: characters.
_GIVEN, _TOLD_CHARACTERS = 32, 4000


_FEWER = (
    "Fewer or shorter ones: `evaluation.num_samples`, `evaluation.max_new_tokens`; 0 samples: none"
)


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Prompt:
    """``given``, ``reference``: token ids; ``ends``: ids that end an answer."""

    given: list[int]
    reference: list[int]
    ends: frozenset[int | None]


class SampleGenerator(Callback):
    """Generates samples at evaluations.

    Args:
        dataset: the evaluation set; None if there is none.
    """

    def __init__(
        self,
        config: Config,
        task: Task,
        model: Any,
        strategy: Strategy,
        precision: Precision,
        dataset: Any | None,
        events: EventLog,
    ) -> None:
        self.config = config
        self.settings = config.evaluation
        self.task = task
        self.model = model
        self.strategy = strategy
        self.comm = strategy.world
        self.precision = precision
        self.dataset = dataset
        self.events = events
        self.active = (
            task.is_language_model and self.settings.num_samples > 0 and dataset is not None
        )
        self._reported: set[str] = set()
        self._prompts: list[_Prompt] | None = None
        self._tokenizer: LoadedTokenizer
        self._defaults: Any = None  # the model's own generation config
        # Logits of a whole prompt can take more memory than a step of training.
        self._last_logits = {"logits_to_keep": 1} if getattr(task, "picks_logits", False) else {}

    def on_evaluation_end(self, result: EvalResult, state: TrainState) -> None:
        """Generate, and emit a ``sample`` event; a collective."""
        if not self.active:
            return
        if (why := self._why_not()) is not None:
            self.active = False
            self._report(
                "why not",
                f"no samples are shown at evaluations: {why} (`evaluation.num_samples: 0` silences"
                " this)",
            )
            return
        began = time.perf_counter()
        if self._prompts is None:
            self._read()
        limit_s = max(_LIMIT_S, _SHARE * result.wall_s)
        answers, cut, problem = self._gather(*self._generate(began + limit_s))
        wall_s = time.perf_counter() - began
        if problem is not None:
            self.active = False
            self._report(
                "problem",
                f"no samples are shown at evaluations: the model could not generate ({problem})",
            )
            return
        assert self._prompts is not None
        samples: list[SampleText] = [
            {
                "prompt": self._prompt_text(one),
                "text": self._text(answers[number]),
                "reference": self._text(one.reference),
            }
            for number, one in enumerate(self._prompts)
            if number in answers
        ]
        self.events.emit(
            {"type": "sample", "step": state.step, "samples": samples, "wall_s": wall_s}
        )
        if cut:
            self._report(
                "cut",
                f"the samples of this evaluation were cut short after {limit_s:.0f} s. {_FEWER}",
            )
        elif wall_s > max(_MUCH_S, _SHARE * result.wall_s):
            self._report(
                "slow",
                f"the samples of this evaluation took {wall_s:.1f} s, and all the rest of it"
                f" {result.wall_s:.1f} s. {_FEWER}",
            )

    def _report(self, what: str, text: str) -> None:
        if what not in self._reported:
            self._reported.add(what)
            logger.info(text)

    # -- who generates
    def _why_not(self) -> str | None:
        strategy, axes = self.strategy, self.comm.axes
        if strategy.rank0_has_full_model:
            return None
        if axes.pipeline > 1:
            return "each token would have to pass through all stages of the pipeline"
        if self.config.parallel.sequence_parallel and axes.tensor > 1:
            return "with `parallel.sequence_parallel` a single token cannot be cut along the tokens"
        if strategy.name not in _TOGETHER:
            return f"with `parallel.mode: {strategy.name}` no rank holds the whole model"
        return None

    @property
    def _together(self) -> bool:
        """All ranks work on each prompt."""
        return not self.strategy.rank0_has_full_model

    def _mine(self, number: int) -> bool:
        """Whether this rank works on a prompt: any rank where all are known to hold the same whole
        weights, else the first."""
        strategy, world = self.strategy, self.comm
        replicas = checkable_replicas(strategy)
        alike = strategy.replicas_diverge or (
            replicas is not None and replicas.replica_group is world
        )
        return self._together or (
            number % world.size == world.rank if alike else world.is_rank_zero
        )

    # -- prompts
    def _read(self) -> None:
        """The same prompts at every evaluation: spread evenly over the validation data."""
        assert self.task.prepared is not None
        assert self.dataset is not None
        path = Path(self.task.prepared.handle.tokenizer_path)
        self._defaults = getattr(_base(self.model), "generation_config", None)
        self._tokenizer = load_tokenizer(path, self.config.trust_remote_code)
        many = min(self.settings.num_samples, len(self.dataset))
        rows = [self.dataset[number * len(self.dataset) // many] for number in range(many)]
        self._prompts = [
            self._prompt(row["input_ids"].tolist(), row["labels_mask"].tolist()) for row in rows
        ]

    def _prompt(self, ids: list[int], carries_loss: list[bool]) -> _Prompt:
        """Up to the first answer; where all is to be learnt, the beginning."""
        start = next((place for place, carries in enumerate(carries_loss) if carries), 0)
        end = next((place for place in range(start, len(ids)) if not carries_loss[place]), len(ids))
        if start < 2:
            start, end = max(1, min(_GIVEN, len(ids) // 2)), len(ids)
        ends = {
            self._tokenizer.eos_token_id,
            ids[end - 1] if ids[end - 1] in self._tokenizer.special_ids else None,
        }
        own = getattr(self._defaults, "eos_token_id", None)
        ends |= set(own) if isinstance(own, list) else {own}
        return _Prompt(
            ids[:start], ids[start:end][: self.settings.max_new_tokens], frozenset(ends - {None})
        )

    def _prompt_text(self, prompt: _Prompt) -> str:
        """As the model sees it, with special tokens."""
        text = self._tokenizer.decode(prompt.given)
        return text if len(text) <= _TOLD_CHARACTERS else f"…{text[-_TOLD_CHARACTERS:]}"

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            [one for one in ids if one not in self._tokenizer.special_ids]
        )

    # -- answers
    def _generate(self, deadline: float) -> tuple[dict[int, list[int]], bool, str | None]:
        """This rank's answers by number of the prompt, whether some were cut short, and what went
        wrong."""
        found: dict[int, list[int]] = {}
        cut = False
        assert self._prompts is not None
        was_training = self.model.training
        self.model.eval()
        try:
            with (
                torch.no_grad(),
                self.precision.autocast(),
                _plain_attention(self.model),
                uncounted(),
            ):
                for number, prompt in enumerate(self._prompts):
                    if self._mine(number):
                        found[number], late = self._answer(prompt, deadline)
                        cut = cut or late
            return found, cut, None
        except (
            Exception
        ) as error:  # a model of any make: one that cannot generate can be trained all the same
            first = (str(error).strip().splitlines() or [""])[0][:200]
            return {}, cut, f"{type(error).__name__}: {first}"
        finally:
            self.model.train(was_training)

    def _answer(self, prompt: _Prompt, deadline: float) -> tuple[list[int], bool]:
        """The likeliest token each time, after the model's own penalty on repetition (as with
        `paceline generate`); and whether there was no time for more."""
        answer = list[int]()
        cache: Any = None
        new = prompt.given

        late = False
        while len(answer) < self.settings.max_new_tokens and not late:
            PROGRESS.tick()
            rows = torch.tensor([new], device=self.comm.device)
            out = self.model(
                input_ids=rows, past_key_values=cache, use_cache=True, **self._last_logits
            )
            cache = getattr(out, "past_key_values", None)
            told = torch.tensor([[*prompt.given, *answer]], device=self.comm.device)
            answer.append(int(self._penalise(told, out.logits[:, -1].float()).argmax()))
            new = answer[-1:] if cache is not None else [*prompt.given, *answer]
            if self._agree(answer[-1] in prompt.ends):
                break
            late = self._agree(time.perf_counter() > deadline)
        if self._together:
            # puts away what was gathered for these forwards
            evaluate(self.strategy, lambda model: {}, self.model)
        return answer, late

    def _penalise(self, told: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        penalty = getattr(self._defaults, "repetition_penalty", None)
        if penalty in (None, 1.0):
            return scores
        from transformers import RepetitionPenaltyLogitsProcessor

        found: torch.Tensor = RepetitionPenaltyLogitsProcessor(penalty)(told, scores)
        return found

    def _agree(self, ends: bool) -> bool:
        """The same on all ranks where these work together: none may go on alone."""
        return self.comm.sum(float(ends))[0] > 0 if self._together else ends

    def _gather(
        self, mine: dict[int, list[int]], cut: bool, problem: str | None
    ) -> tuple[dict[int, list[int]], bool, str | None]:
        told: list[Any] = [
            one for one in self.comm.gather_objects((mine, cut, problem)) if one is not None
        ]
        answers = {number: ids for found, _, _ in reversed(told) for number, ids in found.items()}
        problems = [one for _, _, one in told if one is not None]
        return answers, any(late for _, late, _ in told), problems[0] if problems else None


@contextmanager
def _plain_attention(model: Any) -> Iterator[None]:
    """For the while, without the attention of packed rows: it knows nothing of a cache."""
    base = _base(model)
    packed = attention.attention_of(base) == attention.NAME
    if packed:
        base.set_attn_implementation("sdpa")  # what `attention.install` takes the place of
    try:
        yield
    finally:
        if packed:
            base.set_attn_implementation(attention.NAME)


def _base(model: Any) -> Any:
    """Within adapters."""
    return base_model(model)
