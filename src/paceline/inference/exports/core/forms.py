"""What a form of an export implements: the merged model, GGUF, quantized weights, and so on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from pydantic import JsonValue

from paceline.inference.chat_encoder import PromptTurn

if TYPE_CHECKING:
    import torch

    from paceline.config.schema import Config


@dataclass(frozen=True)
class ExportSource:
    """The trained model that is exported.

    Args:
        run: folder of a run, or of a model or an adapter.
        folder: folder of the model: ``run/model``, or ``run`` itself.
        config: config of the run; None if ``run`` is a model's folder.
        is_adapter: whether the folder has adapters on a base model.
        base: folder or hub ID of the adapters' base model; ``folder`` without adapters.
        name: name of the model; None for the name of the folder ``run``.
    """

    run: Path
    folder: Path
    config: Config | None
    is_adapter: bool
    base: str
    name: str | None = None

    @property
    def trusts_code(self) -> bool:
        """Whether the run has trusted the code in the model's repository."""
        return self.config is not None and self.config.trust_remote_code


@dataclass(frozen=True)
class ExportEstimate:
    """What an export needs.

    Args:
        num_bytes: size of the written files.
        memory_bytes: host memory at the peak.
        time_s: estimated duration in seconds.
    """

    num_bytes: int
    memory_bytes: int
    time_s: float


@dataclass(frozen=True)
class ProofLimit:
    """The largest difference that a proof accepts.

    Args:
        measure: ``logits``: the largest difference of a logit, relative to the largest logit;
            ``kl``: the mean Kullback-Leibler divergence of the next token's distribution.
        value: largest accepted value.
    """

    measure: Literal["logits", "kl"]
    value: float


@dataclass(frozen=True)
class ProofPrompt:
    """A chat that the trained and the exported model continue.

    Args:
        turns: turns of the chat.
        template_args: arguments of the chat template, such as ``enable_thinking``.
        tools: descriptions of functions in OpenAI's form.
        content: how the chat template takes the texts of the turns: ``text``; ``parts`` (a list of
            parts of messages); or ``plain``: it takes no chat, so the texts follow each other
            without it.
    """

    turns: list[PromptTurn]
    template_args: dict[str, JsonValue]
    tools: list[JsonValue]
    content: Literal["text", "parts", "plain"] = "text"

    @property
    def text(self) -> str:
        """The texts of the turns."""
        return "\n\n".join(turn["content"] for turn in self.turns)

    @property
    def messages(self) -> list[dict[str, JsonValue]]:
        """The turns as messages of OpenAI."""
        return [{"role": turn["role"], "content": self._content(turn)} for turn in self.turns]

    def _content(self, turn: PromptTurn) -> JsonValue:
        text = turn["content"]
        return [{"type": "text", "text": text}] if self.content == "parts" else text


class ProofEngine(Protocol):
    """Runs a model for a proof."""

    #: Name with version, such as ``transformers 5.23.0``.
    name: str
    #: Whether :meth:`scores` returns log-probabilities, not logits.
    is_normalized: bool

    def encode(self, prompt: ProofPrompt) -> list[int]:
        """Return the tokens of a chat and of the beginning of its next answer, by the tokenizer and
        the chat template that the model is stored with."""
        ...

    def scores(self, tokens: list[int], start: int) -> torch.Tensor:
        """Return the logits or log-probabilities of the token after each token from position
        ``start``: float32 of shape [len(tokens) - start, size of the vocabulary]."""
        ...

    def generate(self, tokens: list[int], num_tokens: int) -> list[int]:
        """Return the ``num_tokens`` most likely tokens after ``tokens``, also after the end of an
        answer."""
        ...


class ExportForm(Protocol):
    """A form in which a model is exported."""

    @property
    def name(self) -> str:
        """Name in the output of the command, such as ``gguf-q8_0``."""
        ...

    @property
    def merged_dtype(self) -> str | None:
        """Dtype in which adapters are merged before, such as ``auto`` or ``float32``; None for a
        form that keeps them."""
        ...

    @property
    def limit(self) -> ProofLimit:
        """Largest accepted difference from the trained model. Read after :meth:`write`."""
        ...

    def check(self, source: ExportSource) -> None:
        """Raise ConfigError if the model cannot be exported in this form."""
        ...

    def estimate(self, source: ExportSource) -> ExportEstimate:
        """Return what the export needs. The files of a merged model are counted elsewhere."""
        ...

    def write(self, source: ExportSource, model: Path, folder: Path) -> None:
        """Write the export.

        Args:
            model: folder with the full model in the form of ``save_pretrained``: merged, if the
                source has adapters.
            folder: existing, empty folder that receives the files.
        """
        ...

    def unreadable(self) -> str | None:
        """Return why no installed engine can read the form; None if one can."""
        ...

    def open(self, folder: Path, trusts_code: bool = False) -> ProofEngine:
        """Open the export in ``folder``. Called in a new process, which reads nothing else.

        Args:
            trusts_code: whether code in the folder may run.
        """
        ...
