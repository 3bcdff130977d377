"""Generate the completions of a prompt with the forward pass of the model in training.

The completions of a prompt are one batch: the prompt is computed once, and its keys and values are
repeated. All rows have the same length, so there is no padding, except after the results of tools,
and the numbers do not depend on other prompts. ``model.generate`` is not used, because ranks whose
forward pass is a collective must stop at the same token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from paceline.data.text.chats.tool_calls import ChatMessage
from paceline.models.blocks import base_model
from paceline.models.kernels.mixers import find_mixers
from paceline.models.transformers_compat import cache_argument
from paceline.rollouts.sampling import Sampling


@dataclass
class Episode:
    """What an environment has made of a completion.

    Args:
        loss_mask: whether the model has drawn a token, for each token; the others are of the
            results of tools, and of the chat template between two turns. They carry no loss.
        num_calls, num_failures: number of the tool calls that were executed, and of those that
            failed.
        messages: the turns as messages; empty if they are not known.
        prompt_ids: token ids of the prompt, if they are not the ones of the group.
        prompt_text: their text with special tokens; empty if they are the ones of the group.
        prompt: the messages of the prompt; empty if they are not known.
        session: number of the environments of its group; None if they no longer exist.
    """

    loss_mask: list[bool] = field(default_factory=list)
    num_calls: int = 0
    num_failures: int = 0
    messages: list[ChatMessage] = field(default_factory=list)
    prompt_ids: list[int] | None = None
    prompt_text: str = ""
    prompt: list[ChatMessage] = field(default_factory=list)
    session: int | None = None

    def forget(self) -> None:
        """Forget what only rewards need."""
        self.messages, self.prompt, self.session = [], [], None


@dataclass
class Completion:
    """A completion.

    Args:
        ids: token ids, with the token that ends it.
        logps: log-probability of each token when it was drawn.
        is_truncated: whether it has the largest length, and no token ends it.
        episode: what its environment has made of it; None without an environment.
    """

    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    is_truncated: bool = True
    episode: Episode | None = None

    @property
    def loss_mask(self) -> list[bool]:
        """Whether each token carries loss."""
        return [True] * len(self.ids) if self.episode is None else self.episode.loss_mask

    @property
    def drawn_logps(self) -> list[float]:
        """The log-probabilities of the tokens that carry loss."""
        return [logp for logp, has_loss in zip(self.logps, self.loss_mask, strict=True) if has_loss]


def tool_figures(completions: Sequence[Completion]) -> tuple[float, float | None]:
    """Return the number of tool calls per completion, and the share of them that failed; None
    without calls."""
    episodes = [each.episode for each in completions if each.episode is not None]
    calls = sum(episode.num_calls for episode in episodes)
    failures = sum(episode.num_failures for episode in episodes)
    return calls / max(1, len(episodes)), failures / calls if calls else None


@dataclass(frozen=True)
class GroupDecoder:
    """Generates the completions of one prompt after the other.

    Args:
        model: the model in evaluation mode. It can generate alone, or with other ranks
            (``agree``).
        end_ids: token ids that end a completion.
        picks_logits: whether the model can compute the logits of the last token only.
        tick: called after each token.
        agree: function that returns whether all ranks whose forward passes belong together are
            done, or None if each rank generates alone.
        on_prompt_again: called if the prompt is computed for each completion.
    """

    model: nn.Module
    sampling: Sampling
    end_ids: frozenset[int]
    picks_logits: bool
    tick: Callable[[], None]
    agree: Callable[[bool], bool] | None = None
    on_prompt_again: Callable[[], None] = lambda: None

    def decode(self, prompt: Sequence[int], uniforms: torch.Tensor) -> list[Completion]:
        """Return the completions of a prompt.

        Args:
            prompt: token ids.
            uniforms: a number in [0, 1) for each token, float64 [completions, tokens], on the CPU.
                A completion has at most as many tokens.
        """
        return self._draw(_Rows(self, [list(prompt)], len(uniforms)), list(uniforms))

    def decode_each(
        self, prefixes: Sequence[Sequence[int]], uniforms: Sequence[torch.Tensor]
    ) -> list[Completion]:
        """Return a completion of each prefix. They are one batch, in which the prefixes are padded
        on the left: only if they have the same length, or if :func:`can_pad`.

        Args:
            prefixes: token ids.
            uniforms: as for :meth:`decode`, float64 [tokens] for each prefix.
        """
        return self._draw(_Rows(self, [[*each] for each in prefixes], len(prefixes)), uniforms)

    def _draw(self, rows: _Rows, uniforms: Sequence[torch.Tensor]) -> list[Completion]:
        completions = [Completion() for _ in uniforms]
        lengths = [len(each) for each in uniforms]
        noise = rows.to_device(pad_sequence([*uniforms], batch_first=True))

        def is_open(number: int) -> bool:
            completion = completions[number]
            return completion.is_truncated and len(completion.ids) < lengths[number]

        for position in range(max(lengths)):
            logits = rows.next_logits()
            self.tick()
            tokens, logps = self.sampling.draw(logits, noise[rows.indices, position])
            for number, token, logp in zip(rows.numbers, *_on_host(tokens, logps), strict=True):
                if is_open(number):
                    completion = completions[number]
                    completion.ids.append(token)
                    completion.logps.append(logp)
                    completion.is_truncated = token not in self.end_ids
            is_done = not any(map(is_open, range(len(completions))))
            if is_done if self.agree is None else self.agree(is_done):
                break
            rows.append(tokens, [not is_open(number) for number in rows.numbers])
        else:
            self.keep_up(rows.first)  # other ranks draw more tokens
        return completions

    def keep_up(self, prompt: Sequence[int]) -> None:
        """Take part in the forward passes of other ranks, without completions of its own."""
        assert self.agree is not None, "ranks that generate alone have nothing to keep up with"
        rows = _Rows(self, [list(prompt)], 1)
        while True:
            tokens = rows.next_logits().argmax(-1)
            self.tick()
            if self.agree(True):
                break
            rows.append(tokens, [False])


def can_pad(model: nn.Module) -> bool:
    """Return whether the rows of a batch may be padded on the left: whether all layers that look at
    other tokens are known to be attention, which can leave tokens out."""
    base = base_model(model)
    types = set(getattr(base.config.get_text_config(), "layer_types", None) or [])
    parameters = inspect.signature(base.forward).parameters
    return (
        # Sharding derives a class of its own.
        any(each.__module__.startswith("transformers.models.") for each in type(base).__mro__)
        and {"attention_mask", "position_ids"} <= parameters.keys()
        and types <= {"full_attention", "sliding_attention"}
        and not find_mixers(base)
    )


class _Rows:
    """The rows of a forward pass: completions that have not ended, and some that have.

    Attributes:
        numbers: number of the completion of each row.
        indices: the same as a tensor on the device.
        first: a token of a prompt.
    """

    def __init__(self, decoder: GroupDecoder, prompts: list[list[int]], count: int) -> None:
        self.decoder = decoder
        self.numbers = list(range(count))
        self._cache: Any = None
        self._cache_name = cache_argument(base_model(decoder.model))
        device = next(decoder.model.parameters()).device
        #: Token ids that the cache does not contain, [rows, tokens].
        longest = max(map(len, prompts))
        padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        self._ids = torch.tensor(padded, device=device)
        self.indices = torch.arange(count, device=device)
        #: 1 for each token that is not padding, [rows, tokens]; None without padding.
        self._mask: torch.Tensor | None = None
        if any(len(prompt) < longest for prompt in prompts):
            is_token = [[0] * (longest - len(each)) + [1] * len(each) for each in prompts]
            self._mask = torch.tensor(is_token, device=device)
        self.first = prompts[0][:1]
        # Caches of some recurrent layers cannot be repeated for several rows, nor lose rows.
        self._has_fixed_rows = False

    def to_device(self, uniforms: torch.Tensor) -> torch.Tensor:
        """Return random numbers on the device; MPS has no float64."""
        wide = torch.float32 if self._ids.device.type == "mps" else torch.float64
        return uniforms.to(self._ids.device, wide)

    def next_logits(self) -> torch.Tensor:
        """Return the logits of the next token of each row [rows, vocabulary]."""
        count, is_prompt = len(self.numbers), len(self._ids) < len(self.numbers)
        logits = self._run()
        if not is_prompt:
            return logits
        self._ids = self._ids.expand(count, -1)
        if self._cache is None or self._repeat_cache(count):
            return logits.expand(count, -1)
        self._cache, self._has_fixed_rows = None, True
        self.decoder.on_prompt_again()
        return self._run()

    def _run(self) -> torch.Tensor:
        """Run a forward pass and return the logits of the last tokens [rows, vocabulary]."""
        last = {"logits_to_keep": 1} if self.decoder.picks_logits else {}
        output = self.decoder.model(
            input_ids=self._ids,
            use_cache=True,
            **{self._cache_name: self._cache},
            **last,
            **self._padding(),
        )
        self._cache = getattr(output, self._cache_name, None)
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _padding(self) -> dict[str, torch.Tensor]:
        """Return the arguments that tell the model what is padding."""
        if self._mask is None:
            return {}
        positions = (self._mask.cumsum(1) - 1).clamp(min=0)
        return {
            "attention_mask": self._mask,
            "position_ids": positions[:, -self._ids.shape[1] :],
        }

    def _repeat_cache(self, count: int) -> bool:
        """Repeat the cache of one row. Return False if transformers cannot do that."""
        try:
            self._cache.batch_repeat_interleave(count)
        except (AttributeError, IndexError, NotImplementedError):
            return False
        return True

    def append(self, tokens: torch.Tensor, has_ended: Sequence[bool]) -> None:
        """Add a token to each row, and drop the rows that have ended if they are half of them."""
        following = tokens.to(self._ids.device).unsqueeze(1)
        ids = following if self._cache is not None else torch.cat([self._ids, following], 1)
        if self._mask is not None:
            self._mask = torch.cat([self._mask, torch.ones_like(following)], 1)
        kept = [row for row, is_over in enumerate(has_ended) if not is_over]
        if kept and 2 * len(kept) <= len(self.numbers) and not self._has_fixed_rows:
            indices = torch.tensor(kept, device=ids.device)
            ids, self.indices = ids[indices], self.indices[indices]
            self._mask = None if self._mask is None else self._mask[indices]
            self.numbers = [self.numbers[row] for row in kept]
            if self._cache is not None:
                self._cache.batch_select_indices(indices)
        self._ids = ids


def _on_host(tokens: torch.Tensor, logps: torch.Tensor) -> tuple[list[int], list[float]]:
    """Return tokens and their log-probabilities, in one copy from the device, for which the host
    waits once."""
    both = torch.stack([tokens.to(torch.int32), logps.view(torch.int32)]).cpu()
    return both[0].tolist(), both[1].view(torch.float32).tolist()
