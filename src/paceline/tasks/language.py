"""Causal language models: `task: sft` (loss on the answers) and `task: pretrain` (loss on every
token)."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.nn import functional

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.data.collate import SegmentInputs, TokenBatch, collate_packed, collate_padded
from paceline.data.sources.resolve import check_hub_sources
from paceline.data.text.prepare import prepare_tokens
from paceline.data.text.templates import save_template
from paceline.data.text.token_dataset import TokenDataset, TokenSample
from paceline.models import attention, language
from paceline.models.adapters.check import check_adapters
from paceline.models.adapters.lora import adapter_notices
from paceline.models.blocks import base_model
from paceline.models.builtin import resolve_model
from paceline.models.files import check_files, check_hub
from paceline.models.head.chunked_loss import ChunkedLoss, LogitTransform, chunked_loss
from paceline.models.head.transform import find_transform, output_head
from paceline.models.packing import choose_packing
from paceline.models.qwen import CONVERTED_KEY, module_notice
from paceline.tasks.base import Notice, Prepared, Task


class LanguageTask(Task):
    """Trains a causal language model of Hugging Face, in full or with LoRA, on conversations,
    prompts with completions, or plain text."""

    unit = "label tokens"
    is_language_model = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        is_builtin = config.model.startswith("builtin:")
        self.default_learning_rate = 1e-3 if is_builtin else 2e-5
        if config.lora.enable:
            self.default_learning_rate = 1e-4
        self.packed = config.train_args.packing is not False
        self.picks_logits = True
        self._passes_segments = False
        # What the model does to its logits; None if the loss is not computed in chunks.
        self._transform: LogitTransform | None = None
        self._chunk_tokens = 0

    def check(self) -> None:
        check_adapters(self.config)
        check_files(self.config)
        language.check_first_generation_qwen(self.config)
        check_hub(self.config)
        check_hub_sources(self.config)

    def prepare(self) -> Prepared:
        tokens = prepare_tokens(
            self.config, "pretrain" if self.config.task == "pretrain" else "sft", resolve_model
        )
        return Prepared(
            num_train=tokens.num_train,
            num_eval=tokens.num_eval,
            counts=tokens.counts,
            train_tokens=tokens.train_tokens,
            label_tokens=tokens.label_tokens,
            notices=list(tokens.notices),
            fingerprint=f"{tokens.train_folder.name}/{tokens.num_train}",
            handle=tokens,
        )

    def build_datasets(self) -> tuple[Any, Any | None]:
        tokens = self._handle
        train = TokenDataset(tokens.train_folder, tokens.train_indices)
        if tokens.eval_folder is None:
            return train, None
        return train, TokenDataset(tokens.eval_folder, tokens.eval_indices)

    def build_model(self) -> Any:
        return language.load_language_model(self.config)

    def setup(self, model: Any) -> list[Notice]:
        """Choose between packed and padded rows by a test on the model. Called with the model on
        its device, before training."""
        notices = adapter_notices(model, self.config) if self.config.lora.enable else []
        base = base_model(model)
        self.picks_logits = "logits_to_keep" in inspect.signature(base.forward).parameters
        if getattr(getattr(base, "config", None), CONVERTED_KEY, None):
            text = (
                "model: first-generation Qwen, converted to Qwen2; it is trained and saved in that"
                " form"
            )
            notices.append(("info", text))
            if self.config.lora.enable and (text := module_notice(self.config)):
                notices.append(("info", text))
        notices += self._choose_loss(model, base)
        reason = "rows are padded"
        if self.packed:
            device = next(model.parameters()).device
            choice = choose_packing(model, device, self.config, self.device_type)
            notices.append(self._choose_rows(choice.rows))
            reason = choice.reason
        attention.install_requested(base, self.config)
        if (kernel := attention.kernel_of(base)) is not None:
            notices.append(("info", f"attention: {kernel} ({reason})"))
        return notices

    def _choose_loss(self, model: Any, base: Any) -> list[Notice]:
        """Choose between the loss of all tokens at once and that of chunks, by a test on the
        model. The result depends on the config and the model only, as do the chunks, so that
        every strategy adds in the same order."""
        args = self.config.train_args
        vocabulary = int(getattr(base.config.get_text_config(), "vocab_size", 0))
        chunk_tokens = args.loss_chunk_tokens(vocabulary)
        rows = max(args.per_device_train_batch_size, args.per_device_eval_batch_size or 0)
        if chunk_tokens is None or rows * args.max_length <= chunk_tokens:
            return []
        self._chunk_tokens = chunk_tokens
        transform = find_transform(model, next(model.parameters()).device)
        if isinstance(transform, LogitTransform):
            self._transform = transform
            return []
        text = (
            "loss: computed from the logits of all tokens of a micro-batch, which takes more"
            f" memory; it cannot be computed in chunks with this model: {transform}"
        )
        return [("warning", text)]

    def _choose_rows(self, packing: str) -> Notice:
        if packing != "none":
            self._passes_segments = packing == "segments"
            text = (
                "packing: samples of a micro-batch share one row without padding (checked: they do"
                " not mix)"
            )
            return "info", text
        if self.config.train_args.packing is True:
            raise ConfigError(
                "`train_args.packing: true` is not supported with this model: it mixes samples that"
                " share a row",
                fix="set `train_args.packing: auto` or `false`: the same loss, with padding",
            )
        self.packed = False
        text = (
            "packing: off; this model mixes samples that share a row, so rows are padded (same"
            " loss, slower)"
        )
        return "warning", text

    def collate(self, samples: Sequence[TokenSample]) -> TokenBatch:
        if self.packed:
            return collate_packed(samples)
        return collate_padded(samples, self._handle.pad_token_id)

    def count(self, batch: TokenBatch) -> int:
        return int(batch["num_labels"])

    def num_tokens(self, batch: TokenBatch) -> int:
        return int(batch["num_tokens"])

    def loss(self, model: Any, batch: TokenBatch) -> Any:
        """Return the cross entropy in nats, summed over the tokens with loss."""
        with attention.known_padding(batch.get("attention_mask"), batch["num_tokens"]):
            return self._loss(model, batch)

    def _loss(self, model: Any, batch: TokenBatch) -> Any:
        names = ["input_ids", "attention_mask", "position_ids"]
        if self._passes_segments:
            names += SegmentInputs.__annotations__
        inputs: dict[str, Any] = {name: value for name, value in batch.items() if name in names}
        inputs["use_cache"] = False
        keep, targets = batch["keep"], batch["targets"]
        if self.picks_logits:
            inputs["logits_to_keep"] = keep
        if self._transform is not None and targets.numel() > self._chunk_tokens:
            selected = None if self.picks_logits else keep
            loss = ChunkedLoss(
                output_head(model), self._transform, targets, selected, self._chunk_tokens
            )
            with chunked_loss(loss):
                return loss.result(model(**inputs).logits)
        logits = model(**inputs).logits
        if not self.picks_logits:
            logits = logits[:, keep]
        return functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), reduction="sum"
        )

    def save_model(self, model: Any, folder: Path) -> None:
        tokenizer = None if self.prepared is None else self.prepared.handle.tokenizer_path
        language.save_language_model(model, tokenizer, folder)
        if tokenizer is not None and self.config.chat_template is not None:
            save_template(self.config, folder)
