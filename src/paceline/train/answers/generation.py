"""Generate answers to rows of the validation data with the model in training.

Decoding is greedy, draws no random numbers, and applies the model's own repetition penalty, as
`paceline generate` does. Weights, gradients and the model's train/eval mode are left unchanged. The
batches do not depend on the number of ranks, so neither do the answers.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from paceline.config.schema import Config
from paceline.core.errors import RunError
from paceline.core.user_code import error_summary
from paceline.data.text.token_dataset import TokenSample
from paceline.data.text.tokenizer import LoadedTokenizer, load_tokenizer
from paceline.distributed import torch_compat
from paceline.distributed.rank_zero import rank_zero_phase
from paceline.distributed.timing.progress import ProgressTracker
from paceline.distributed.traffic import uncounted
from paceline.models import attention
from paceline.models.blocks import base_model
from paceline.models.transformers_compat import cache_argument
from paceline.parallel.capabilities import reason_against_generation
from paceline.parallel.strategy import Strategy
from paceline.tasks.base import Task
from paceline.train.precision import Precision

#: Strategies whose forward pass is a collective of all ranks.
_TOGETHER = ("zero2", "zero3", "tensor", "hybrid", "deepspeed")
#: Length of the prompt, in tokens, if every token of the text contributes to the loss.
_PREFIX_TOKENS = 32


#: Time within which all ranks fail if the model cannot generate at all.
_FAILURE_WAIT_S = 5.0


@dataclass(frozen=True)
class Prompt:
    """A prompt.

    Args:
        ids, reference: token ids of the prompt and of its answer in the data.
        end_ids: token ids that end an answer.
        read_sample: function that reads the sample of the prompt, if it has images. Their pixels
            are read for each answer: the pixels of all prompts might not fit in memory.
    """

    ids: list[int]
    reference: list[int]
    end_ids: frozenset[int | None]
    read_sample: Callable[[], TokenSample] | None = None


@dataclass(frozen=True)
class Answers:
    """Answers as token ids by prompt number. ``is_cut`` is true if the time ran out; ``error`` says
    why there are none."""

    ids: dict[int, list[int]]
    is_cut: bool = False
    error: str | None = None


class AnswerGenerator:
    """Generates answers on all ranks: a replica processes whole batches of prompts.

    Ranks that hold the full weights decode independently of each other. If the forward pass is a
    collective, the replicas decode a batch each and stop together.
    """

    #: Number of calls of :meth:`generate` in this process, the same on every rank.
    _num_calls = 0

    def __init__(
        self,
        task: Task,
        model: Any,
        strategy: Strategy,
        precision: Precision,
        config: Config,
        progress: ProgressTracker,
    ) -> None:
        self.task, self.model, self.strategy = task, model, strategy
        self.precision, self.config, self.progress = precision, config, progress
        self.comm = strategy.world
        self.base: Any = base_model(model)
        self.max_new_tokens = config.evaluation.max_new_tokens
        # Logits of a full prompt can take more memory than a step of training.
        picks_logits = getattr(task, "picks_logits", False)
        self._last_logits = {"logits_to_keep": 1} if picks_logits else {}
        # Positions beyond these may not exist.
        text_config: Any = getattr(self.base, "config", None)
        if hasattr(text_config, "get_text_config"):
            text_config = text_config.get_text_config()
        self._max_tokens = getattr(text_config, "max_position_embeddings", None) or sys.maxsize

    def unsupported_reason(self) -> str | None:
        """Return why the model cannot generate with this strategy; None if it can."""
        if self._works_together and self.strategy.name not in _TOGETHER:
            return f"with `parallel.mode: {self.strategy.name}` no rank holds the full model"
        return reason_against_generation(self.config, self.comm.axes)

    @cached_property
    def tokenizer(self) -> LoadedTokenizer:
        assert self.task.prepared is not None
        path = Path(self.task.prepared.handle.tokenizer_path)
        return load_tokenizer(path, self.config.trust_remote_code)

    def text(self, ids: list[int]) -> str:
        """Return the text of token ids without special tokens."""
        special_ids = self.tokenizer.special_ids
        return self.tokenizer.decode([token for token in ids if token not in special_ids])

    @cached_property
    def _generation_config(self) -> Any:
        return getattr(self.base, "generation_config", None)

    # -- prompts
    def first_prompt(self, rows: Any, number: int) -> Prompt | None:
        """Return the tokens of a row before the first answer, or the first tokens of the row if all
        of them contribute to the loss. If an image follows, return the last prompt."""
        row: TokenSample = rows[number]
        ids, has_loss = row["input_ids"].tolist(), row["labels_mask"].tolist()
        start = next((index for index, flag in enumerate(has_loss) if flag), 0)
        if start < 2:
            start, end = max(1, min(_PREFIX_TOKENS, len(ids) // 2)), len(ids)
        else:
            end = next((index for index in range(start, len(ids)) if not has_loss[index]), len(ids))
        return self._prompt(rows, number, row, start, end) or self.last_prompt(rows, number)

    def last_prompt(self, rows: Any, number: int) -> Prompt | None:
        """Return the tokens of a row before the last answer, or None if the row has no prompt or no
        answer."""
        row: TokenSample = rows[number]
        ids, has_loss = row["input_ids"].tolist(), row["labels_mask"].tolist()
        end = next((index + 1 for index in reversed(range(len(ids))) if has_loss[index]), 0)
        start = next((index + 1 for index in reversed(range(end)) if not has_loss[index]), 0)
        return self._prompt(rows, number, row, start, end) if start > 0 else None

    def _prompt(
        self, rows: Any, number: int, row: TokenSample, start: int, end: int
    ) -> Prompt | None:
        """Return the first ``start`` tokens of a row as a prompt, or None if an image of the row
        follows."""
        ids = row["input_ids"].tolist()
        inputs = self._row_inputs(row, start)
        if inputs is None:
            return None
        end_ids = {self.tokenizer.eos_token_id}
        if ids[end - 1] in self.tokenizer.special_ids:
            end_ids.add(ids[end - 1])
        eos_ids = getattr(self._generation_config, "eos_token_id", None)
        end_ids |= set(eos_ids) if isinstance(eos_ids, list) else {eos_ids}
        read_sample = partial(rows.__getitem__, number) if inputs else None
        return Prompt(ids[:start], ids[start:end], frozenset(end_ids - {None}), read_sample)

    def _row_inputs(self, row: TokenSample, num_tokens: int) -> dict[str, torch.Tensor] | None:
        read = getattr(self.task, "prompt_inputs", None)
        return read(row, num_tokens) if read is not None else {}

    # -- answers
    def generate(
        self, prompts: Sequence[Prompt], batch_size: int = 1, limit_s: float | None = None
    ) -> Answers:
        """Return the answers to the prompts, on every rank. A collective.

        Args:
            batch_size: number of prompts that are decoded together, padded on the left. Prompts
                with images are decoded one by one, because models compute the positions of images
                from rows without padding.
            limit_s: seconds after which the answers are cut short.
        """
        AnswerGenerator._num_calls += 1
        deadline = None if limit_s is None else time.perf_counter() + limit_s
        # Prompts of similar lengths need little padding.
        if any(prompt.read_sample is not None for prompt in prompts):
            batch_size = 1
        numbers = sorted(range(len(prompts)), key=lambda number: len(prompts[number].ids))
        batches = [
            numbers[start : start + batch_size] for start in range(0, len(numbers), batch_size)
        ]
        if self._works_together:
            return self._gather(self._generate(prompts, batches, deadline))
        with rank_zero_phase(self.comm, "generating answers"):
            local = self._generate(prompts, batches, deadline)
        return self._gather(local)

    def _generate(
        self, prompts: Sequence[Prompt], batches: list[list[int]], deadline: float | None
    ) -> Answers:
        """Return this rank's answers."""
        ids: dict[int, list[int]] = {}
        is_cut = False
        was_training = self.model.training
        self.model.eval()
        try:
            with (
                torch.no_grad(),
                self.precision.autocast(),
                attention.without_packing(self.base),
                uncounted(),
            ):
                for batch, is_filler in self._local_batches(batches):
                    answers, is_late = self._decode([prompts[number] for number in batch], deadline)
                    is_cut = is_cut or is_late
                    if not is_filler:
                        ids.update(zip(batch, answers, strict=True))
            return Answers(ids, is_cut)
        except Exception as error:  # a model that cannot generate can still be trained
            if self._works_together and not self._all_fail():
                # The others wait for this rank in a collective of the forward pass.
                raise RunError(
                    "rank {rank} failed to generate answers at an evaluation, and others did not:"
                    " {reason}",
                    code="generation-failed-on-rank",
                    fix="set `evaluation.num_samples: 0`, and remove metrics of generated answers"
                    " from `evaluation.metrics`, to train without generating",
                    rank=self.comm.rank,
                    reason=error_summary(error),
                ) from error
            return Answers({}, is_cut, error_summary(error))
        finally:
            self.model.train(was_training)

    def _all_fail(self) -> bool:
        """Report to the other ranks that this one failed. Return whether all of them fail within a
        short time."""
        store = torch_compat.default_store()
        key = f"paceline/generation/{AnswerGenerator._num_calls}"
        store.add(key, 1)
        deadline = time.monotonic() + _FAILURE_WAIT_S
        while store.add(key, 0) < self.comm.size:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    @property
    def _works_together(self) -> bool:
        """Whether the forward pass is a collective."""
        return not self.strategy.rank0_has_full_model

    def _local_batches(self, batches: list[list[int]]) -> list[tuple[list[int], bool]]:
        """Return the batches of this rank, each with whether it only keeps the ranks together. If
        all ranks hold the same full weights, they divide the batches among themselves; otherwise
        the replicas do, or rank 0 processes all."""
        rank, num_shares = self.comm.rank, self.comm.size
        if self._works_together:
            # Ranks that divide rows in training have the same weights, and whole prompts here.
            parts, part = self.comm.axes.context, self.comm.coordinates["context"]
            rank = self.strategy.replica * parts + part
            num_shares = self.strategy.num_replicas * parts
            fillers = -len(batches) % num_shares
            padded = [*((batch, False) for batch in batches), *((batches[0], True),) * fillers]
            return padded[rank::num_shares]
        has_group = self.strategy.replica_group is self.comm
        if not (has_group or self.strategy.replicas_diverge):
            rank, num_shares = (0, 1) if self.comm.is_rank_zero else (len(batches), 1)
        return [(batch, False) for batch in batches[rank::num_shares]]

    def _decode(
        self, prompts: list[Prompt], deadline: float | None
    ) -> tuple[list[list[int]], bool]:
        """Return the answers to a batch of prompts, and whether the time ran out.
        ``model.generate`` is not used, because ranks whose forward pass is a collective must stop
        at the same token."""
        answers: list[list[int]] = [[] for _ in prompts]
        texts = [prompt.ids for prompt in prompts]
        inputs = {**self._padded(texts), **self._image_inputs(prompts[0])}
        cache: Any = None
        cache_name = cache_argument(base_model(self.model))
        has_ended = [False] * len(prompts)
        is_late = False
        for _ in range(self.max_new_tokens):
            self.progress.tick()
            output = self.model(
                **inputs, **{cache_name: cache}, use_cache=True, **self._last_logits
            )
            cache = getattr(output, cache_name, None)
            if cache is None and prompts[0].read_sample is not None:
                raise NotImplementedError("the model keeps no keys and values of images")
            scores = self._penalize(texts, output.logits[:, -1].float())
            tokens = scores.argmax(-1).tolist()
            for number, token in enumerate(tokens):
                texts[number] = [*texts[number], token]
                if not has_ended[number]:
                    answers[number].append(token)
                    is_full = len(texts[number]) >= self._max_tokens
                    has_ended[number] = is_full or token in prompts[number].end_ids
            is_late = deadline is not None and time.perf_counter() > deadline
            are_done, is_late = self._agree(all(has_ended), is_late)
            if are_done or is_late:
                break
            if all(has_ended):  # only other ranks continue
                inputs, cache = self._padded([[tokens[0]]]), None
            else:
                inputs = self._padded(texts) if cache is None else self._next(inputs, tokens)
        if self._works_together:
            # Releases the weights that were gathered for these forward passes.
            self.strategy.evaluate(lambda model: {}, self.model)
        return answers, is_late

    def _image_inputs(self, prompt: Prompt) -> dict[str, torch.Tensor]:
        if prompt.read_sample is None:
            return {}
        inputs = self._row_inputs(prompt.read_sample(), len(prompt.ids)) or {}
        return {name: value.to(self.comm.device) for name, value in inputs.items()}

    def _padded(self, texts: list[list[int]]) -> dict[str, torch.Tensor]:
        """Return the inputs of the model for texts that are padded on the left. Texts of one length
        need no mask."""
        longest = max(len(text) for text in texts)
        pad_id, device = self.tokenizer.pad_token_id, self.comm.device
        rows = [[pad_id] * (longest - len(text)) + text for text in texts]
        inputs = {"input_ids": torch.tensor(rows, device=device)}
        if any(len(text) < longest for text in texts):
            masks = [[0] * (longest - len(text)) + [1] * len(text) for text in texts]
            mask = torch.tensor(masks, device=device)
            inputs["attention_mask"] = mask
            inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        return inputs

    def _next(self, inputs: dict[str, torch.Tensor], tokens: list[int]) -> dict[str, torch.Tensor]:
        """Return the inputs of the model for the next token of each text, after its cache."""
        following = {"input_ids": inputs["input_ids"].new_tensor(tokens).unsqueeze(1)}
        if "attention_mask" in inputs:
            mask = inputs["attention_mask"]
            following["attention_mask"] = torch.cat([mask, mask.new_ones(len(tokens), 1)], 1)
            positions = inputs["position_ids"][:, -1:] + 1
            following["position_ids"] = positions.clamp(max=self._max_tokens - 1)
        return following

    def _penalize(self, texts: list[list[int]], scores: torch.Tensor) -> torch.Tensor:
        penalty = getattr(self._generation_config, "repetition_penalty", None)
        if penalty in (None, 1.0):
            return scores
        from transformers import RepetitionPenaltyLogitsProcessor

        processor: Any = RepetitionPenaltyLogitsProcessor(penalty)
        rows = [
            processor(torch.tensor([text], device=scores.device), scores[number : number + 1])
            for number, text in enumerate(texts)
        ]
        return torch.cat(rows)

    def _agree(self, is_done: bool, is_late: bool) -> tuple[bool, bool]:
        """Return whether all ranks that decode together are done, and whether any is late."""
        if not self._works_together:
            return is_done, is_late
        num_busy, num_late = self.comm.sum(float(not is_done), float(is_late))
        return num_busy == 0, num_late > 0

    def _gather(self, local: Answers) -> Answers:
        by_rank: list[Any] = self.comm.gather_objects(local)
        reported: list[Answers] = [answers for answers in by_rank if answers is not None]
        ids: dict[int, list[int]] = {}
        for answers in reversed(reported):
            ids.update(answers.ids)
        error = next((answers.error for answers in reported if answers.error is not None), None)
        return Answers(ids, any(answers.is_cut for answers in reported), error)
