"""Causal language models: `task: sft` (loss on the answers) and `task: pretrain` (loss on every
token)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from paceline.config.metrics.evaluation import value_names
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.report import SourceFigures
from paceline.core.texts import UserText
from paceline.data.collate import (
    SegmentInputs,
    TokenBatch,
    add_sources,
    add_weights,
    collate_packed,
    collate_padded,
)
from paceline.data.context.batch import divide_batch
from paceline.data.counts import StreamCounts
from paceline.data.encoding.prepare import PreparedTokens, prepare_tokens, text_kind
from paceline.data.order.build import SourceSize
from paceline.data.sources.resolve import check_hub_sources
from paceline.data.streaming.choice import try_stream
from paceline.data.text.templates import end_tokens, save_template
from paceline.data.text.token_dataset import TokenDataset, TokenSample
from paceline.data.text.tokenizer import load_tokenizer
from paceline.models import attention, language
from paceline.models.adapters.check import check_adapters
from paceline.models.blocks import base_model
from paceline.models.builtin import resolve_model
from paceline.models.checks.packing import PackingChoice, choose_packing
from paceline.models.context.choice import ContextMethod
from paceline.models.context.setup import divide_attention, mixed_samples
from paceline.models.files import check_files, check_hub
from paceline.models.head.chunked_loss import ChunkedLoss, chunked_loss
from paceline.models.head.router_coefficient import check_task_of_router_loss
from paceline.models.head.router_loss import RouterLoss, find_router_loss, is_deterministic
from paceline.models.head.softmax import IGNORED, LogitTransform, weighted_sum
from paceline.models.head.split_vocabulary import split_vocabulary
from paceline.models.head.transform import choose_transform, output_head
from paceline.models.kernels import mixers
from paceline.models.kernels.layer_kernels import has_attention, layer_kernels
from paceline.models.notices import model_notices
from paceline.models.qwen import CONVERTED_KEY, module_notice
from paceline.models.shape.loss_chunks import NO_CHUNKS, choose_loss_chunks
from paceline.models.transforms.embedding_noise import add_embedding_noise, noisy_embeddings
from paceline.models.vision.types import check_text_only
from paceline.tasks.base import Notice, Prepared, Task
from paceline.tasks.token_ids import check_token_ids, token_notices

if TYPE_CHECKING:
    from paceline.data.streaming.build import StreamRows
    from paceline.data.streaming.prepare import PreparedStream


class LanguageTask(Task):
    """Trains a causal language model of Hugging Face, in full or with LoRA, on conversations,
    prompts with completions, or plain text."""

    unit = "label tokens"
    is_language_model = True
    tokenizes = True
    #: Number of token sequences of a sample.
    sequences_per_sample = 1

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.default_learning_rate = 1e-3 if config.model.startswith("builtin:") else 2e-5
        if config.lora.enable:
            self.default_learning_rate = 1e-4
        self.packed = config.train_args.packing is not False
        self.picks_logits = True
        self._passes_segments = False
        # What the model does to its logits; None if the loss is not computed in chunks.
        self._transform: LogitTransform | None = None
        self._chunks = NO_CHUNKS
        self._router_loss: RouterLoss | None = None
        #: How the ranks that divide rows exchange keys and values.
        self.context_method: ContextMethod | None = None

    def prompt_inputs(self, sample: TokenSample, num_tokens: int) -> dict[str, torch.Tensor] | None:
        """Return the inputs of the model, besides token IDs, for the first ``num_tokens`` tokens of
        a sample, each for one row; None if they cannot be separated from the rest of the sample."""
        return {}

    def check(self) -> None:
        check_text_only(self.config)
        check_adapters(self.config)
        check_files(self.config)
        language.check_first_generation_qwen(self.config)
        check_hub(self.config)
        check_hub_sources(self.config)
        check_task_of_router_loss(self.config)

    def prepare(self) -> Prepared:
        kind = text_kind(self.config)
        stream, notices = try_stream(self.config, kind, resolve_model)
        if stream is not None:
            stream.notices += token_notices(self.config, stream.tokenizer_path)
            return _prepared_stream(self.config, stream)
        tokens = prepare_tokens(self.config, kind, resolve_model, self.num_prepare_workers)
        tokens.notices = [*notices, *tokens.notices]
        prepared = self._prepared_from(tokens)
        prepared.source_figures = tokens.source_figures
        return prepared

    def _prepared_from(self, tokens: PreparedTokens) -> Prepared:
        check_token_ids(self.config, tokens)
        return Prepared(
            num_train=tokens.num_train,
            num_eval=tokens.num_eval,
            counts=tokens.counts,
            train_tokens=tokens.train_tokens,
            label_tokens=tokens.label_tokens,
            notices=list(tokens.notices),
            sources=tokens.source_sizes,
            fingerprint=f"{tokens.train_folder.name}/{tokens.num_train}",
            handle=tokens,
        )

    def build_datasets(self) -> tuple[Any, Any | None]:
        tokens = self._handle
        has_noise = self.config.train_args.neftune_noise_alpha is not None
        train: Any
        if isinstance(tokens, PreparedTokens):
            ends: tuple[int, ...] = ()
            if tokens.source_figures:
                ends = tuple(accumulate(source["samples"] for source in tokens.source_figures))
            train = TokenDataset(
                tokens.train_folder,
                tokens.train_indices,
                with_seeds=has_noise,
                source_ends=ends,
            )
        else:
            train = tokens.dataset
        if tokens.eval_folder is None:
            return train, None
        return train, TokenDataset(tokens.eval_folder, tokens.eval_indices)

    def build_model(self) -> Any:
        model: Any = language.load_language_model(self.config)
        alpha = self.config.train_args.neftune_noise_alpha
        if alpha is not None:
            add_embedding_noise(base_model(model).get_input_embeddings(), alpha)
        return model

    def setup(self, model: Any) -> list[Notice]:
        """Choose between packed and padded rows by a test on the model. Called with the model on
        its device, before training."""
        notices = model_notices(model, self.config)
        base = base_model(model)
        self._router_loss = find_router_loss(base, self.config)
        if self._router_loss is not None:
            self.total_names = self._router_loss.total_names
            self.sums_own_totals = is_deterministic(base_model(model), self.config)
        self.picks_logits = "logits_to_keep" in inspect.signature(base.forward).parameters
        if getattr(getattr(base, "config", None), CONVERTED_KEY, None):
            text = UserText(
                "model: first-generation Qwen, converted to Qwen2; it is trained and saved in"
                " that form",
                code="first-generation-qwen",
            )
            notices.append(("info", text))
            if self.config.lora.enable and (of_modules := module_notice(self.config)):
                notices.append(("info", of_modules))
        with mixers.computed_on(self.device_type, model, self.config.train_args.mixed_dtype):
            notices += self._choose_loss(model, base)
        reason = "rows are padded"
        if self.packed:
            choice = self._choose_packing(model)
            notices += self._choose_rows(choice)
            reason = choice.reason
        attention.install_requested(base, self.config)
        kernel = attention.kernel_of(base) if has_attention(base) else None
        if kernel is not None:
            notices.append(
                (
                    "info",
                    UserText(
                        "attention: {kernel} ({reason})",
                        code="attention-kernel",
                        kernel=kernel,
                        reason=reason,
                    ),
                )
            )
        notices += [("info", each.notice(self.device_type)) for each in layer_kernels(base)]
        if self.place is not None:
            self.context_method, text = divide_attention(
                base, self.place, self.config, self.device_type
            )
            self._passes_segments = True
            notices.append(("info", text))
        return notices

    def _choose_loss(self, model: Any, base: Any) -> list[Notice]:
        """Choose between the loss of all tokens at once and the loss by chunks, by a test on the
        model. The result depends on the config, the model and the type of the device only, as do
        the chunks, so that every strategy adds in the same order."""
        args = self.config.train_args
        vocabulary = int(getattr(base.config.get_text_config(), "vocab_size", 0))
        chunks = choose_loss_chunks(args, vocabulary, self.device_type)
        rows = max(args.per_device_train_batch_size, args.per_device_eval_batch_size or 0)
        rows *= self.sequences_per_sample
        # A head whose vocabulary is split always computes the loss itself.
        if not chunks.divides(rows * args.max_length) and self.tensor_ranks == 1:
            return []
        self._chunks = chunks
        transform = choose_transform(model, self.config)
        if isinstance(transform, LogitTransform):
            self._transform = transform
            return []
        text = UserText(
            "loss: computed from the logits of all tokens of a micro-batch, which takes more"
            " memory; it cannot be computed in chunks with this model: {transform}",
            code="loss-not-in-chunks",
            transform=transform,
        )
        return [("warning", text)]

    def _choose_packing(self, model: Any) -> PackingChoice:
        device, divides = next(model.parameters()).device, self.place is not None
        return choose_packing(model, device, self.config, self.device_type, None, divides)

    def _choose_rows(self, packing: PackingChoice) -> list[Notice]:
        if packing.rows != "none":
            self._passes_segments = packing.rows == "segments"
            text = UserText(
                "packing: samples of a micro-batch share one row without padding (checked:"
                " they do not mix)",
                code="packing-checked",
            )
            return [("info", text), *_mixer_notices(packing)]
        args = self.config.train_args
        if self.place is not None:
            raise mixed_samples(self.config, self.place, packing.mixing)
        if args.packs_rows or args.packing is True:
            setting = (
                f"packing_strategy: {args.packing_strategy}" if args.packs_rows else "packing: true"
            )
            raise ConfigError(
                "`train_args.{setting}` is not supported with this model: it mixes samples that"
                " share a row; {mixing}",
                code="packing-mixes-samples",
                fix="set `train_args.packing: auto` or `false` without `packing_strategy`: rows"
                " are padded",
                setting=setting,
                mixing=packing.mixing,
            )
        self.packed = False
        text = UserText(
            "packing: off; this model mixes samples that share a row, so rows are padded (same"
            " loss, slower): {mixing}",
            code="packing-off",
            mixing=packing.mixing,
        )
        return [("warning", text)]

    def collate(self, samples: Sequence[TokenSample]) -> TokenBatch:
        batch = (
            collate_packed(samples)
            if self.packed
            else collate_padded(samples, self._handle.pad_token_id)
        )
        if "source" in samples[0]:
            add_sources(batch, samples, len(self.config.sources()))
        if any("weight" in sample for sample in samples):
            add_weights(batch, samples)
        return self._part_of(batch)

    def _part_of(self, batch: TokenBatch) -> TokenBatch:
        """Return this rank's part of a batch, if the ranks of a group divide rows."""
        if self.place is None:
            return batch
        return divide_batch(batch, self.place.rank, self.place.size)

    def count(self, batch: TokenBatch) -> float:
        """Return the number of tokens with loss, each times the weight of its row."""
        return batch.get("count", float(batch["num_labels"]))

    def num_tokens(self, batch: TokenBatch) -> int:
        return int(batch["num_tokens"])

    def loss(self, model: Any, batch: TokenBatch) -> Any:
        """Return the cross entropy in nats, summed over the tokens with loss, each times the weight
        of its row."""
        return self._sums(model, batch, counts_correct=False)["loss"]

    def totals(self, model: Any, batch: TokenBatch) -> dict[str, torch.Tensor]:
        """Return the sums that :class:`~paceline.models.head.router_loss.RouterLoss` needs."""
        if self._router_loss is None:
            return {}
        inputs = {**self._inputs(batch), "output_router_logits": True}
        if self.picks_logits:
            inputs["logits_to_keep"] = 1
        with self._forward_context(batch):
            router_logits = model(**inputs).router_logits
        return self._router_totals(self._router_loss, router_logits, batch)

    def _router_totals(
        self, loss: RouterLoss, router_logits: Sequence[torch.Tensor], batch: TokenBatch
    ) -> dict[str, torch.Tensor]:
        count = self.count(batch) if self.place is None or self.place.rank == 0 else 0.0
        return loss.totals(router_logits, _token_mask(batch), count)

    def evaluate(self, model: Any, batch: TokenBatch) -> dict[str, torch.Tensor]:
        """Return sums over the tokens with loss: ``loss`` and, with that metric,
        ``token_accuracy`` (number of tokens that the model predicts)."""
        return self._sums(model, batch, "token_accuracy" in self.config.evaluation.metrics)

    def metric_names(self, prepared: Prepared) -> list[str] | None:
        values = value_names(self.config.evaluation.metrics)
        return None if values is None else ["loss", *values]

    def _sums(self, model: Any, batch: TokenBatch, counts_correct: bool) -> dict[str, torch.Tensor]:
        with self._forward_context(batch):
            loss, num_correct = self._loss(model, batch, counts_correct)
        return {"loss": loss, "token_accuracy": num_correct} if counts_correct else {"loss": loss}

    @contextmanager
    def _forward_context(self, batch: TokenBatch) -> Iterator[None]:
        with (
            attention.known_padding(batch.get("attention_mask"), batch["num_tokens"]),
            noisy_embeddings(batch.get("noise_keys"), batch.get("noise_scales")),
        ):
            yield

    def _loss(self, model: Any, batch: TokenBatch, counts_correct: bool) -> tuple[Any, Any]:
        """Return the sum of the losses and, if counted, the number of correct predictions."""
        inputs = self._inputs(batch)
        weights = batch["target_weights"].flatten() if "target_weights" in batch else None
        keep, targets = batch["keep"], batch["targets"]
        smoothing = self.config.train_args.label_smoothing_factor if model.training else 0.0
        if self.picks_logits:
            inputs["logits_to_keep"] = keep
        head = output_head(model)
        is_split = split_vocabulary(head) is not None
        if self._transform is not None and (is_split or self._chunks.divides(targets.numel())):
            selected = None if self.picks_logits else keep
            has_sources = "source_losses" in batch
            chunks = ChunkedLoss(
                head,
                self._transform,
                targets,
                selected,
                self._chunks.tokens or max(1, targets.numel()),
                smoothing,
                counts_correct,
                targets.new_zeros(targets.numel(), dtype=torch.float32) if has_sources else None,
                weights,
            )
            with chunked_loss(chunks):
                output = model(**inputs)
                loss = chunks.result(output.logits)
            if chunks.token_losses is not None:
                _record_sources(batch, chunks.token_losses)
            return self._with_router_loss(loss, output, batch), chunks.num_correct
        output = model(**inputs)
        logits = output.logits
        if not self.picks_logits:
            logits = logits[:, keep]
        logits, targets = logits.flatten(0, 1).float(), targets.flatten()
        has_sources = "source_losses" in batch
        loss = functional.cross_entropy(
            logits,
            targets,
            reduction="sum" if weights is None and not has_sources else "none",
            label_smoothing=smoothing,
        )
        if has_sources:
            _record_sources(batch, loss)
        loss = loss.sum() if weights is None else weighted_sum(loss, weights)
        loss = self._with_router_loss(loss, output, batch)
        if not counts_correct:
            return loss, None
        is_correct = logits.argmax(-1) == targets
        return loss, is_correct.sum() if weights is None else weighted_sum(is_correct, weights)

    def _with_router_loss(self, loss: Any, output: Any, batch: TokenBatch) -> Any:
        """Add the auxiliary loss of the experts in training, where the sums over the global batch
        are known."""
        if self._router_loss is None or "totals" not in batch:
            return loss
        totals, logits = batch["totals"], output.router_logits
        if not totals:  # of this batch alone
            with torch.no_grad():
                totals = self._router_totals(self._router_loss, logits, batch)
        return loss + self._router_loss.term(logits, _token_mask(batch), totals)

    def _inputs(self, batch: TokenBatch) -> dict[str, Any]:
        """Return the arguments of the model."""
        names = ["input_ids", "attention_mask", "position_ids"]
        if self._passes_segments:
            names += SegmentInputs.__annotations__
        inputs: dict[str, Any] = {name: value for name, value in batch.items() if name in names}
        if self._router_loss is not None and "totals" in batch:
            inputs["output_router_logits"] = True
        return {**inputs, "use_cache": False}

    def save_model(self, model: Any, folder: Path) -> None:
        tokenizer = None if self.prepared is None else self.prepared.handle.tokenizer_path
        if tokenizer is not None:
            language.add_stop_tokens(model, self.stop_tokens(Path(tokenizer)))
        language.save_language_model(model, tokenizer, folder, self.config.model)
        if tokenizer is not None:
            save_template(self.config, folder)

    def stop_tokens(self, folder: Path) -> list[int]:
        """Return the tokens that the model was trained to end its answers with."""
        tokenizer = load_tokenizer(folder, self.config.trust_remote_code)
        ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        return ends if self.config.task == "pretrain" else ends + end_tokens(self.config, tokenizer)


def _prepared_stream(config: Config, stream: PreparedStream) -> Prepared:
    rows = stream.rows
    sources: tuple[SourceSize, ...] = ()
    if config.mixing != "concat" and all(size.num_rows is not None for size in rows):
        sources = tuple(
            SourceSize(
                source.path,
                size.num_rows or 0,
                size.num_rows or 0,
                round(size.mean_tokens * (size.num_rows or 0)),
                round(size.mean_labels * (size.num_rows or 0)),
            )
            for source, size in zip(config.sources(), rows, strict=True)
        )
    return Prepared(
        num_train=rows[0].num_rows if len(rows) == 1 else None,
        num_eval=stream.num_eval,
        counts=StreamCounts(),
        mean_tokens=sum(size.share * size.mean_tokens for size in rows),
        notices=list(stream.notices),
        sources=sources,
        source_figures=_source_figures(config, rows),
        fingerprint=stream.fingerprint,
        handle=stream,
    )


def _source_figures(config: Config, rows: Sequence[StreamRows]) -> tuple[SourceFigures, ...]:
    """Return the figures of streamed sources, if there are several."""
    sources = config.sources()
    if len(sources) == 1:
        return ()
    figures: list[SourceFigures] = [{"name": source.path} for source in sources]
    if config.mixing != "concat":
        for figure, size in zip(figures, rows, strict=True):
            figure["share"] = size.share
            if size.num_rows is not None:
                figure["rows"] = size.num_rows
    return tuple(figures)


def _mixer_notices(packing: PackingChoice) -> list[Notice]:
    """Return how the recurrent and convolution layers of a model compute packed rows."""
    if not packing.mixers:
        return []
    kinds = ", ".join(packing.mixers)
    if packing.in_kernels:
        text = UserText(
            "packing: {kinds} computes a row in one call of the installed kernels, which begin anew"
            " at each sample",
            code="mixers-in-kernels",
            kinds=kinds,
        )
    else:
        text = UserText(
            "packing: {kinds} computes each sample of a row by itself, samples of similar length in"
            " one call",
            code="mixers-by-sample",
            kinds=kinds,
        )
    return [("info", text)]


def _token_mask(batch: TokenBatch) -> torch.Tensor | None:
    """Return 1 for each token and 0 for padding, [rows, tokens]; None without padding."""
    if batch.get("is_filler"):
        return torch.zeros_like(batch["input_ids"])
    return batch.get("attention_mask")


def _record_sources(batch: TokenBatch, losses: torch.Tensor) -> None:
    """Record the losses of the targets by source."""
    weights = batch.get("target_weights", batch["targets"] != IGNORED)
    batch["source_losses"].record(losses, batch["target_sources"].flatten(), weights.flatten())
