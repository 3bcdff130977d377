"""What an engine is, and what goes in and out. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import JsonValue

from paceline.core.errors import ConfigError
from paceline.inference.chat_encoder import ChatEncoder, PromptTurn

#: Largest number of new tokens of an answer.
MAX_NEW_TOKENS = 32768
#: Largest number of tokens of a prompt for a model whose config has no limit.
MAX_PROMPT_TOKENS = 131072


@dataclass(frozen=True)
class ChatPrompt:
    """A chat to continue.

    Args:
        tools: descriptions of the tools that the model may call.
        arguments: variables of the chat template.
    """

    turns: Sequence[PromptTurn]
    tools: Sequence[Mapping[str, JsonValue]] = ()
    arguments: Mapping[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the inputs of a model, each with one row.

    Args:
        inputs: the inputs by name, on the CPU.
        limit: largest number of tokens of prompt and answer together; None for no limit.
    """

    inputs: Any
    limit: int | None

    @property
    def tokens(self) -> list[int]:
        """The ids of the tokens."""
        ids: list[int] = self.inputs["input_ids"][0].tolist()
        return ids

    @property
    def num_tokens(self) -> int:
        return int(self.inputs["input_ids"].shape[1])

    def largest_answer(self, requested: int) -> int:
        """Return how many new tokens there may be if ``requested`` are wanted."""
        if self.limit is None:
            return requested
        return min(requested, self.limit - self.num_tokens)


@dataclass(frozen=True)
class GenerationRequest:
    """What to generate.

    Args:
        model: name of the model.
        temperature: temperature of sampling; 0 takes the most likely token each time.
        top_p: share of the probability of the tokens to sample from; None for the model's default.
        stop: texts that end the answer, which does not contain them.
        num_logprobs: number of the most likely tokens whose log-probabilities are wanted besides
            each new token; None for no log-probabilities at all.
        kept_tokens: texts of special tokens that the text of the answer contains.
        time_limit_s: time after which the answer ends.
    """

    model: str
    prompt: EncodedPrompt
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float | None = None
    seed: int = 0
    stop: Sequence[str] = ()
    num_logprobs: int | None = None
    kept_tokens: frozenset[str] = frozenset()
    time_limit_s: float | None = None


@dataclass(frozen=True)
class GeneratedToken:
    """A new token.

    Args:
        logprob: logarithm of its probability by the model's logits, before anything changes them.
        likeliest: ids and log-probabilities of the most likely tokens.
    """

    id: int
    logprob: float | None = None
    likeliest: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True)
class AnswerPart:
    """The next part of an answer, and its tokens."""

    text: str
    tokens: Sequence[GeneratedToken] = ()


@dataclass(frozen=True)
class AnswerEnd:
    """The end of an answer.

    Args:
        reason: ``stop`` at an end token or a stop text, ``length`` at the limit of tokens or time,
            ``cancelled`` if it was not wanted any more.
        num_tokens: number of generated tokens, with the end token.
    """

    reason: Literal["stop", "length", "cancelled"]
    num_tokens: int


#: Receives the parts of an answer, in the thread that generates it.
Emit = Callable[[AnswerPart], None]


class Engine(ABC):
    """Generates answers with several models, each with a name."""

    #: Name of the engine.
    name: str
    #: Number of answers that are generated at the same time.
    num_parallel: int = 1
    reads_images: bool = True

    @property
    @abstractmethod
    def models(self) -> Sequence[str]:
        """The names of the models."""

    @abstractmethod
    def encoder(self, model: str) -> ChatEncoder:
        """Return what encodes the chats of a model."""

    @abstractmethod
    def token_limit(self, model: str) -> int | None:
        """Return the largest number of tokens of prompt and answer together; None for no limit."""

    @abstractmethod
    def generate(
        self, request: GenerationRequest, emit: Emit, is_cancelled: Callable[[], bool]
    ) -> AnswerEnd:
        """Generate an answer.

        Args:
            emit: gets the parts of the answer as they are generated.
            is_cancelled: asked after each token; True ends the answer.
        """

    def close(self) -> None:
        """End what the engine has started."""
        return

    def encode(self, model: str, prompt: ChatPrompt | str) -> EncodedPrompt:
        """Return the inputs of a prompt: a chat, or a text to continue.

        Raises:
            ConfigError: the model cannot read it, or it is too long.
        """
        encoder = self.encoder(model)
        if isinstance(prompt, str):
            inputs = encoder.encode_text(prompt)
        else:
            inputs = encoder.encode(prompt.turns, prompt.tools, prompt.arguments)
        return self.checked(model, inputs)

    def checked(self, model: str, inputs: Any) -> EncodedPrompt:
        """Return the encoded prompt with these inputs.

        Raises:
            ConfigError: it is empty or too long.
        """
        limit = self.token_limit(model)
        encoded = EncodedPrompt(inputs, limit)
        if not encoded.num_tokens:
            raise ConfigError(
                "the prompt has no tokens", code="empty-prompt", fix="write a longer prompt"
            )
        if encoded.num_tokens + 1 > (limit or MAX_PROMPT_TOKENS):
            raise ConfigError(
                "the chat has {num_prompt} tokens, but the model reads at most {limit}",
                code="chat-too-long",
                fix="clear the chat and ask again",
                num_prompt=f"{encoded.num_tokens:,}",
                limit=f"{limit or MAX_PROMPT_TOKENS:,}",
            )
        return encoded
