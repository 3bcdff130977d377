"""Generate completions of several turns, between which the model calls the tools of an environment.

The completions of a prompt are one batch in each turn. After the first one, their prefixes have
different lengths and are padded, unless the model has recurrent layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import torch
from pydantic import JsonValue

from paceline.config.schema.grpo import Grpo
from paceline.core.errors import RunError
from paceline.data.kinds.base import Encoded
from paceline.data.kinds.prompt import PromptKind, PromptRow, read_row
from paceline.data.text.chats.tool_calls import ChatMessage
from paceline.data.text.token_dataset import TokenDataset
from paceline.distributed.timing.progress import ProgressTracker
from paceline.rewards.environment_session import EnvironmentSession
from paceline.rewards.protocol import RequestedCall
from paceline.rollouts.decoding import Completion, Episode, GroupDecoder, can_pad
from paceline.tasks.grpo.tool_turns import ToolTurns
from paceline.train.rollouts.engines.base import PromptTokens, share_of
from paceline.train.rollouts.engines.generation import RolloutGenerator
from paceline.train.rollouts.scoring import GroupScorer

#: Seconds that an environment may take longer than its limit until the other ranks worry.
_MARGIN_S = 60.0


@dataclass
class _Chat:
    """A completion while it is generated.

    Args:
        index: number of the completion in its group.
        prompt_ids: token ids of its prompt.
        calls: tool calls of its last turn that are still to be executed.
        num_turns: number of turns that the model has written.
    """

    index: int
    prompt_ids: list[int]
    completion: Completion
    episode: Episode
    calls: list[RequestedCall] = field(default_factory=list)
    num_turns: int = 0


@dataclass(frozen=True)
class TurnGenerator:
    """Generates completions in which the model calls tools.

    Args:
        generator: generates the tokens.
        scorer: has the processes of the environments, which also compute the rewards.
        kind: converts a prompt to tokens.
        tool_turns: converts turns.
        settings: section ``grpo`` of the config.
    """

    generator: RolloutGenerator
    scorer: GroupScorer
    kind: PromptKind
    tool_turns: ToolTurns
    settings: Grpo
    progress: ProgressTracker

    def generate(
        self,
        dataset: TokenDataset,
        prompts: Sequence[PromptTokens],
        purpose: str,
        step: int,
        num_completions: int,
        update: int,
    ) -> dict[int, list[Completion]]:
        """Return the completions of this rank's prompts, as
        :meth:`~paceline.train.rollouts.engines.base.CompletionEngine.generate` does. A collective.

        Args:
            dataset: the prompts with their rows.
            update: number of the next update, for messages.

        Raises:
            RunError: an environment raised, took too long, or ended its process.
        """
        own = share_of(self.generator.comm, len(prompts))
        rows = [read_row(dataset, prompts[number].number) for number in own]
        with self._processes(rows, update) as sessions, self.generator.decoder() as decoder:
            results = {
                number: self._group(decoder, session, row, prompts[number], purpose, step, count)
                for number, session, row, count in zip(
                    own, sessions, rows, [num_completions] * len(own), strict=True
                )
            }
            if decoder.agree is not None:
                while not decoder.agree(True):
                    decoder.keep_up(prompts[0].ids)
        return results

    @contextmanager
    def _processes(
        self, rows: Sequence[PromptRow], update: int
    ) -> Iterator[list[EnvironmentSession]]:
        """Yield the environments of the prompts. After an error, their processes are ended."""
        places = [row.place for row in rows]
        sessions = self.scorer.open_sessions(places, update) if places else []
        try:
            yield sessions
        except BaseException:
            self.scorer.kill()
            raise

    def _group(
        self,
        decoder: GroupDecoder,
        session: EnvironmentSession,
        row: PromptRow,
        prompt: PromptTokens,
        purpose: str,
        step: int,
        num_completions: int,
    ) -> list[Completion]:
        uniforms = self.generator.uniforms(prompt, purpose, step, num_completions)
        seed = f"{self.generator.limits.seed} {purpose} {step} {prompt.number}"
        chats = [self._begin(session, row, prompt, index, seed) for index in range(num_completions)]
        if all(chat.prompt_ids == chats[0].prompt_ids for chat in chats):
            self._take_part(decoder)
            parts = decoder.decode(chats[0].prompt_ids, uniforms)
            for chat, part in zip(chats, parts, strict=True):
                self._add_turn(chat, part)
        else:
            self._continue(decoder, chats, uniforms)
        while waiting := [chat for chat in chats if chat.calls]:
            for chat in waiting:
                self._execute(session, chat, seed)
            self._continue(decoder, [chat for chat in waiting if chat.calls], uniforms)
        return [chat.completion for chat in chats]

    def _begin(
        self,
        session: EnvironmentSession,
        row: PromptRow,
        prompt: PromptTokens,
        index: int,
        seed: str,
    ) -> _Chat:
        """Create the environment of a completion."""
        with self.progress.patient(session.timeout_s + _MARGIN_S):
            # All completions of a prompt have the same random numbers, and so the same task.
            values = cast("dict[str, JsonValue]", {**row.columns, "prompt": row.prompt})
            observation = session.reset(index, seed, values)
        self.progress.tick()
        messages: list[ChatMessage] = (
            [{"role": "user", "content": row.prompt}]
            if isinstance(row.prompt, str)
            else [*row.prompt]
        )
        ids = prompt.ids
        if observation:
            messages[-1] = {**messages[-1], "content": messages[-1]["content"] + observation}
            ids = self._prompt_ids(messages, session, index)
        episode = Episode(prompt=messages, prompt_ids=None if ids == prompt.ids else ids)
        episode.session = session.number
        completion = Completion(episode=episode)
        return _Chat(index, ids, completion, episode)

    def _prompt_ids(
        self, messages: list[ChatMessage], session: EnvironmentSession, index: int
    ) -> list[int]:
        """Return the tokens of a prompt to which an environment has added."""
        (encoded,) = self.kind.encode([PromptRow(messages, {})])
        length = len(encoded.input_ids) if isinstance(encoded, Encoded) else 0
        if isinstance(encoded, Encoded) and length <= self.kind.longest:
            return [int(token) for token in encoded.input_ids]
        raise RunError(
            "what the environment `{text}` adds to the prompt at step {step}, for completion"
            " {index} of {place}, {problem}",
            code="unusable-observation",
            fix="raise `train_args.max_length`, or return a shorter text from `reset`",
            text=session.environment,
            step=session.step,
            index=index,
            place=session.place,
            problem=(
                f"makes it {length} tokens long, and {self.kind.longest} fit"
                if isinstance(encoded, Encoded)
                else "is refused by the chat template"
            ),
        )

    # -- turns
    def _take_part(self, decoder: GroupDecoder) -> None:
        """Have the other ranks take part in the next forward passes, though they may have no turn
        left."""
        if decoder.agree is not None:
            decoder.agree(False)

    def _continue(
        self, decoder: GroupDecoder, chats: Sequence[_Chat], uniforms: torch.Tensor
    ) -> None:
        """Have the model write the next turn of completions."""
        prefixes = [[*chat.prompt_ids, *chat.completion.ids] for chat in chats]
        left = [uniforms[chat.index, len(chat.completion.ids) :] for chat in chats]
        size = len(chats) if can_pad(decoder.model) else 1
        for start in range(0, len(chats), max(1, size)):
            part = slice(start, start + size)
            self._take_part(decoder)
            turns = decoder.decode_each(prefixes[part], left[part])
            for chat, turn in zip(chats[part], turns, strict=True):
                self._add_turn(chat, turn)

    def _add_turn(self, chat: _Chat, part: Completion) -> None:
        """Append a turn that the model has written."""
        completion, episode = chat.completion, chat.episode
        message = self.tool_turns.read([*chat.prompt_ids, *completion.ids], part.ids)
        completion.ids += part.ids
        completion.logps += part.logps
        completion.is_truncated = part.is_truncated
        episode.loss_mask += [True] * len(part.ids)
        episode.messages.append(message)
        chat.num_turns += 1
        limit, calls = self.settings.max_turns, message.get("tool_calls", [])
        is_last = part.is_truncated or (limit is not None and chat.num_turns >= limit)
        chat.calls = [] if is_last else [RequestedCall(**call["function"]) for call in calls]

    def _execute(self, session: EnvironmentSession, chat: _Chat, seed: str) -> None:
        """Execute the tool calls of a completion, and append their results. If they do not fit, the
        completion ends without them."""
        completion, episode = chat.completion, chat.episode
        with self.progress.patient(session.timeout_s + _MARGIN_S):
            results = session.call(chat.index, f"{seed} {chat.index} {chat.num_turns}", chat.calls)
        self.progress.tick()
        episode.num_calls += len(results)
        episode.num_failures += sum(result["has_failed"] for result in results)
        messages: list[ChatMessage] = [
            {"role": "tool", "name": result["name"], "content": result["content"]}
            for result in results
        ]
        suffix = self.tool_turns.suffix(messages)
        if len(completion.ids) + len(suffix) >= self.settings.max_completion_length:
            completion.is_truncated, chat.calls = True, []
            return
        completion.ids += suffix
        completion.logps += [0.0] * len(suffix)
        episode.loss_mask += [False] * len(suffix)
        episode.messages += messages
