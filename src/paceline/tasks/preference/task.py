"""`task: dpo`, `orpo`, `kto` and `simpo`."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.texts import UserText
from paceline.data.collate import MetricSums, TokenBatch, collate_packed, collate_padded
from paceline.data.encoding.prepare import PreparedTokens, prepare_tokens, text_kind
from paceline.data.kinds.pair import PairKind, PreferenceSample, PreferenceTransform
from paceline.data.text.token_dataset import TokenDataset, TokenSample
from paceline.models.builtin import resolve_model
from paceline.models.transforms.parameters import disable_dropout
from paceline.tasks.base import Notice, Prepared
from paceline.tasks.preference.objectives import Rows, make_objective
from paceline.tasks.preference.reference import reference_key
from paceline.tasks.sequences import SequenceTask


class PreferenceBatch(TokenBatch, total=False):
    """The sequences of the preferred answers of a micro-batch, then the other answers' sequences.

    Args:
        is_answer: whether each target belongs to an answer, bool in the shape of the targets, if
            the loss also covers prompts.
        answer_tokens: number of tokens of each sequence's answer, float32 [sequences].
        index: index of each sample in the dataset, int64 [samples].
        reference: float32 [samples, values].
        is_desirable: float32 [samples], of single answers.
        mismatched: prompts with the answers of other samples.
        totals: sums over the global batch.
        metric_sums: receives the metrics.
    """

    is_answer: torch.Tensor
    answer_tokens: torch.Tensor
    index: torch.Tensor
    reference: torch.Tensor
    is_desirable: torch.Tensor
    mismatched: "PreferenceBatch"
    totals: dict[str, torch.Tensor]
    metric_sums: MetricSums


class PreferenceTask(SequenceTask):
    """Trains a causal language model of Hugging Face, in full or with LoRA, on pairs of answers or
    on answers that are marked as good or bad.

    The reference model is the model before training. Its log-probabilities are computed once and
    stored, so it takes no memory while the model is trained.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.objective = make_objective(config)
        is_builtin = config.model.startswith("builtin:")
        self.default_learning_rate = 1e-4 if is_builtin else 1e-5 if config.lora.enable else 1e-6
        has_pairs = not self.objective.has_single_answers
        self.unit = "pairs" if has_pairs else "answers"
        self.sequences_per_sample = 1 + has_pairs
        self.gathers = self.objective.inputs
        self.total_names = self.objective.total_names
        self.step_metrics = self.objective.metric_names
        self._has_mismatched = "kl" in self.objective.inputs

    def check(self) -> None:
        super().check()
        args = self.config.train_args
        self._refuse(
            (args.packs_rows, f"packing_strategy: {args.packing_strategy}", "both answers of a"
             " pair must be in the same micro-batch"),
            (args.neftune_noise_alpha is not None, "neftune_noise_alpha", "the reference"
             " log-probabilities have no noise"),
            (args.label_smoothing_factor, "label_smoothing_factor", "the loss has no distribution"
             " over tokens; see `preference.label_smoothing`"),
            (args.train_on_inputs, "train_on_inputs: true", "the loss compares answers"),
            (args.train_on_turns != "all", f"train_on_turns: {args.train_on_turns}", "the loss"
             " compares the answers of the last turn"),
        )  # fmt: skip

    def check_batch(self, global_batch_size: int) -> None:
        super().check_batch(global_batch_size)
        if self._has_mismatched and global_batch_size < 2:
            raise ConfigError(
                "`task: kto` with a global batch of 1 sample cannot train: the divergence from the"
                " reference is estimated on the answers to other prompts of the batch",
                code="kto-batch-too-small",
                allowed="a global batch of at least 2 samples",
                fix="raise `train_args.per_device_train_batch_size` or"
                " `train_args.gradient_accumulation_steps`, or set `preference.loss_type:"
                " apo_zero_unpaired`",
            )

    def prepare(self) -> Prepared:
        """Tokenize the answers, or find them in the token cache."""
        tokens = prepare_tokens(
            self.config, text_kind(self.config), resolve_model, self.num_prepare_workers
        )
        return self._prepared_from(tokens)

    def build_datasets(self) -> tuple[Any, Any | None]:
        tokens: PreparedTokens = self._handle
        max_length = self.config.train_args.max_length
        size = (self.global_batch_size or tokens.num_train) if self._has_mismatched else 0
        transform = PreferenceTransform(size, max_length)
        return tokens.open(PairKind.columns, transform)

    def build_model(self) -> Any:
        model = super().build_model()
        if self.config.preference.disable_dropout:
            disable_dropout(model)
        return model

    def setup(self, model: Any) -> list[Notice]:
        notices = super().setup(model)
        if self.config.lora.enable and self.config.lora.dropout:
            what = "off (`preference.disable_dropout`)"
            if not self.config.preference.disable_dropout:
                what = "on in training, and off for the reference log-probabilities"
            notices.append(("info", UserText("dropout: {subject}", code="dropout", subject=what)))
        return notices

    # -- batches
    def collate(self, samples: Sequence[Any]) -> PreferenceBatch:
        rows: Sequence[PreferenceSample] = samples
        if self.objective.has_single_answers:
            batch = self._sequences(rows)
            batch["is_desirable"] = torch.tensor([float(row["chosen_length"] > 0) for row in rows])
        else:
            parts = [_parts_of(row) for row in rows]
            batch = self._sequences([*(part[0] for part in parts), *(part[1] for part in parts)])
        batch["index"] = torch.tensor([row["index"] for row in rows])
        batch["metric_sums"] = MetricSums(self.step_metrics)
        if "reference" in rows[0]:
            values = np.stack([row["reference"] for row in rows])
            batch["reference"] = torch.from_numpy(values)
        if self._has_mismatched:
            batch["mismatched"] = self._sequences([row["mismatched"] for row in rows])
        return batch

    def _sequences(self, sequences: Sequence[TokenSample]) -> PreferenceBatch:
        """Return the tokens of the sequences, packed in one row or padded."""
        answers = [row["labels_mask"] for row in sequences]
        if self.objective.trains_on_prompts:
            # The first half are the preferred answers.
            half = len(sequences) // 2
            sequences = [
                {**row, "labels_mask": np.ones_like(row["labels_mask"])} if number < half else row
                for number, row in enumerate(sequences)
            ]
        tokens = (
            collate_packed(sequences)
            if self.packed
            else collate_padded(sequences, self._handle.pad_token_id)
        )
        counts = [int(np.count_nonzero(row["labels_mask"][1:])) for row in sequences]
        batch = cast("PreferenceBatch", tokens)
        batch["target_counts"] = tuple(counts)
        batch["answer_tokens"] = torch.tensor(
            [float(np.count_nonzero(mask[1:])) for mask in answers]
        )
        if self.objective.trains_on_prompts:
            batch["is_answer"] = self._answer_targets(tokens, sequences, answers)
        return cast("PreferenceBatch", self._part_of(batch))

    def _answer_targets(
        self, tokens: TokenBatch, sequences: Sequence[TokenSample], answers: list[np.ndarray]
    ) -> torch.Tensor:
        if self.packed:
            parts = zip(answers, sequences, strict=True)
            flags = [answer[1:][row["labels_mask"][1:]] for answer, row in parts]
            return torch.from_numpy(np.concatenate(flags))
        flags_by_row = np.zeros(tokens["input_ids"].shape, dtype=np.bool_)
        for row, answer in enumerate(answers):
            flags_by_row[row, : len(answer) - 1] = answer[1:]
        return torch.from_numpy(flags_by_row)[:, tokens["keep"]]

    def count(self, batch: Any) -> int:
        return int(batch["index"].shape[0])

    def num_tokens(self, batch: Any) -> int:
        return int(batch["num_tokens"])

    # -- losses
    def totals(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        return self._once(self._totals(model, batch))

    def _totals(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        if self._has_mismatched:
            return self.objective.totals({"kl": self._divergences(model, batch)})
        lengths = batch["answer_tokens"][: self.count(batch)]
        rows = {"chosen_tokens": lengths}
        if self.objective.trains_on_prompts:
            tokens = batch["target_counts"][: self.count(batch)]
            rows["chosen_nll_tokens"] = lengths.new_tensor(tokens)
        return self.objective.totals(rows)

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        """Return the sum of the losses of the samples, and record their metrics."""
        rows = self._rows(model, batch)
        totals = batch.get("totals", {})
        if not totals and self.total_names:  # of a single micro-batch
            with torch.no_grad():
                totals = self._totals(model, batch)
        loss = self.objective.losses(rows, totals).sum()
        with torch.no_grad():
            detached = {name: row.detach() for name, row in rows.items()}
            batch["metric_sums"].record(self.objective.metrics(detached, totals))
        if self.place is not None and self.place.rank:
            # Each rank of the group has the loss of whole samples, and the gradient of its part.
            loss = loss - loss.detach()
        return loss

    def _once(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return values that each rank of a context group has, such that their sum over the group
        is the value: zeros on all ranks but one."""
        if self.place is None or self.place.rank == 0:
            return values
        return {name: torch.zeros_like(value) for name, value in values.items()}

    def finish_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        return self.objective.finish(metrics)

    def evaluate(self, model: Any, batch: Any) -> dict[str, torch.Tensor]:
        """Return the values of each sample from which :meth:`metrics` computes the loss."""
        rows = dict(self._rows(model, batch))
        if self._has_mismatched:
            rows["kl"] = self._divergences(model, batch)
        return self._once({name: rows[name] for name in self.gathers})

    def metric_names(self, prepared: Prepared) -> list[str]:
        names = ["loss", *self.objective.metric_names, "rewards/margins"]
        return list(dict.fromkeys(names))

    def metrics(self, gathered: dict[str, torch.Tensor]) -> dict[str, float]:
        """Return the loss and the metrics over all samples."""
        totals = self.objective.totals(gathered) if self.total_names else {}
        sums = self.objective.metrics(gathered, totals)
        means = {
            name: float(total / number) for name, (total, number) in sums.items() if number > 0
        }
        loss = float(self.objective.losses(gathered, totals).mean())
        return {"loss": loss, **self.objective.finish(means)}

    # -- log-probabilities
    @property
    def num_reference_values(self) -> int:
        return 2 * self.objective.needs_reference - (
            self.objective.has_single_answers and not self._has_mismatched
        )

    def reference_key(self, dataset: TokenDataset) -> str | None:
        return reference_key(self.config, dataset)

    def reference_values(self, model: Any, batch: Any) -> dict[str, torch.Tensor]:
        """Return the log-probabilities of both answers of each sample, or of the single one and of
        the mismatched one."""
        logps = self._answer_logps(model, batch)
        if not self.objective.has_single_answers:
            values = torch.stack(logps.chunk(2), dim=1)
        elif self._has_mismatched:
            others = self._answer_logps(model, batch["mismatched"])
            values = torch.stack([logps, others], dim=1)
        else:
            values = logps.unsqueeze(1)
        return self._once({"values": values, "index": batch["index"]})

    def _rows(self, model: Any, batch: Any) -> Rows:
        """Return the values of each sample that its loss is computed from, except ``kl``."""
        losses = self._token_losses(model, batch)
        logps = -self._sum_by_sequence(self._of_answers(losses, batch), batch)
        rows: dict[str, torch.Tensor] = {}
        if self.objective.has_single_answers:
            rows = {"logps": logps, "is_desirable": batch["is_desirable"]}
            if "reference" in batch:
                rows["ref_logps"] = batch["reference"][:, 0]
            return rows
        names = ("chosen", "rejected")
        for name, values, tokens in zip(
            names, logps.chunk(2), batch["answer_tokens"].chunk(2), strict=True
        ):
            rows[f"{name}_logps"], rows[f"{name}_tokens"] = values, tokens
        for number, name in enumerate(names if "reference" in batch else ()):
            rows[f"ref_{name}_logps"] = batch["reference"][:, number]
        if self.objective.trains_on_prompts:
            count = self.count(batch)
            rows["chosen_nll"] = self._sum_by_sequence(losses, batch)[:count]
            counts = batch["target_counts"][:count]
            rows["chosen_nll_tokens"] = batch["answer_tokens"].new_tensor(counts)
        return rows

    def _divergences(self, model: Any, batch: Any) -> torch.Tensor:
        """Return the log likelihood ratio of each mismatched answer [samples]."""
        logps = self._answer_logps(model, batch["mismatched"])
        reference: torch.Tensor = batch["reference"]
        return logps - reference[:, 1]

    def _answer_logps(self, model: Any, batch: Any) -> torch.Tensor:
        """Return the log-probability of the answer of each sequence, float32 [sequences]."""
        losses = self._of_answers(self._token_losses(model, batch), batch)
        return -self._sum_by_sequence(losses, batch)

    def _of_answers(self, losses: torch.Tensor, batch: Any) -> torch.Tensor:
        flags = batch.get("is_answer")
        return losses if flags is None else torch.where(flags, losses, 0.0)


def _parts_of(sample: PreferenceSample) -> tuple[TokenSample, TokenSample]:
    """Return the sequences of the preferred answer and of the other one."""
    length = sample["chosen_length"]
    chosen: TokenSample = {
        "input_ids": sample["input_ids"][:length],
        "labels_mask": sample["labels_mask"][:length],
    }
    rejected: TokenSample = {
        "input_ids": sample["input_ids"][length:],
        "labels_mask": sample["labels_mask"][length:],
    }
    return chosen, rejected
