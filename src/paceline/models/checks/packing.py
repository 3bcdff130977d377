"""Choose how samples share a row, by a test on the model."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.texts import UserText
from paceline.data.collate import SegmentInputs, find_tensors, segment_inputs
from paceline.distributed import torch_compat
from paceline.distributed.communicator import Communicator
from paceline.distributed.environment import RankEnv
from paceline.models import attention, packed_row
from paceline.models.blocks import base_model, evaluation_mode
from paceline.models.checks.cache import StoredCheck, check_of_model
from paceline.models.checks.mixing import (
    ROW_ERRORS,
    TOLERANCE,
    explain_mixing,
    not_computed,
    rows_agree,
)
from paceline.models.context.attention import install_context
from paceline.models.context.methods import GATHER
from paceline.models.context.place import ContextPlace
from paceline.models.kernels import mixers
from paceline.models.kernels.attention_choice import SDPA, AttentionChoice, choose_attention
from paceline.models.packed_row import ModelInput
from paceline.models.transforms.compile import outside_graphs

#: Numbers of tokens of the samples of the check, for models of attention layers only.
_LENGTHS = (7, 5)
_OWN_ATTENTION = "the model's own attention"
_DIVIDED = "attention for divided rows"


@dataclass(frozen=True)
class PackingChoice:
    """How samples share a row.

    Args:
        rows: "segments" (each layer computes each sample by itself), "positions" (the model's own
            attention, with samples separated by position_ids), or "none" (padded rows).
        reason: why the attention was chosen.
        mixing: with padded rows, why samples cannot share a row.
        mixers: classes of the recurrent and convolution layers that keep samples apart.
        in_kernels: whether these layers are computed by kernels of other packages, in one call.
    """

    rows: str
    reason: str
    mixing: UserText | None = None
    mixers: tuple[str, ...] = ()
    in_kernels: bool = False


@dataclass(frozen=True)
class CheckedRow:
    """The samples of the check.

    Args:
        samples: arguments of the model for each sample in a row of its own.
        row: arguments of the model for all samples in one row, without their lengths.
        segments: the lengths of the samples.
        identity: a text that differs for other samples.
        is_inside: whether the lengths reach the layers by
            :func:`~paceline.models.packed_row.pass_segments`, and not as arguments of the model.
    """

    samples: Sequence[Mapping[str, ModelInput]]
    row: Mapping[str, ModelInput]
    segments: SegmentInputs
    identity: str = ""
    is_inside: bool = False

    def logits(self, model: Any, with_segments: bool) -> torch.Tensor:
        """Return the logits of the row.

        Args:
            with_segments: whether the layers get the lengths of the samples.
        """
        result: torch.Tensor
        if not with_segments:
            result = model(**self.row).logits
        elif self.is_inside:
            result = packed_row.with_segments(self.segments, model, **self.row).logits
        else:
            result = model(**self.row, **self.segments).logits
        return result


#: Returns the samples of the check; among them are texts with these numbers of tokens.
BuildRow = Callable[[Sequence[int]], CheckedRow]


def identity_of(row: Mapping[str, ModelInput]) -> str:
    """Return :attr:`CheckedRow.identity` of the arguments of a model."""
    digest = hashlib.sha256()
    for tensor in find_tensors(dict(row)):
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(
            tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


def choose_packing(
    model: Any,
    device: torch.device,
    config: Config,
    device_type: str = "cpu",
    build_row: BuildRow | None = None,
    divides_rows: bool = False,
) -> PackingChoice:
    """Choose how samples share a row, and switch the model to the layers that this requires.

    Runs short samples separately and in one row, and compares the logits. With recurrent or
    convolution layers, a sample is shorter than the convolution, another one is longer than what a
    layer computes at once, and two have equal lengths. Models that mix samples (unknown recurrent
    layers, older attention implementations) are trained with padding. If tensors have no values, as
    in a simulation, the logits count as equal. That a model passed the test is stored for later
    runs; one that did not is tested again, because the reason may have been a lack of memory. A
    strategy that splits the model keeps it on the CPU until then; its attention is nevertheless
    computed on the device that the run trains on, by the kernel that trains.

    Args:
        device: device of the model, which may still be the CPU.
        device_type: type of device that the run trains on.
        build_row: a function that returns the samples of the check; by default, they are texts of
            random tokens. The model then computes what else it is trained on, such as images.
        divides_rows: whether ranks will divide each row. Then layers must get the lengths of the
            samples: for attention over packed rows, or over divided rows, which also computes soft
            caps and sinks.
    """
    base = base_model(model)
    numbers = base.config.get_text_config()
    if getattr(numbers, "attention_chunk_size", None):
        # Attention chunks are counted from the start of the row, which two short samples would not
        # reveal.
        text = UserText("it computes attention in chunks of a row", code="attention-in-chunks")
        return PackingChoice("none", "the model computes attention in chunks", text)
    requested = config.train_args.attn_implementation
    choice = choose_attention(requested, attention.attention_setup(config, base, device_type))
    recurrent = mixers.find_mixers(base)
    lengths: tuple[int, ...] = _LENGTHS
    if recurrent:  # samples of equal length are computed together
        lengths = (*_LENGTHS, *mixers.check_lengths(recurrent), _LENGTHS[0])
    try:
        row = (build_row or partial(_row_of_texts, base, device))(lengths)
    except ROW_ERRORS as error:
        return PackingChoice("none", _OWN_ATTENTION, not_computed(error))
    identity = [row.identity] if row.identity else []
    versions = mixers.installed_versions()
    stored = check_of_model(
        "packing", model, config, device_type, choice.kernel, versions, *identity
    )
    packing = _restored(stored, base, choice)
    if packing is None:
        check = _Check(model, config, choice, device_type, recurrent, row, divides_rows)
        uses_kernels = choice.kernel != SDPA or bool(recurrent and mixers.installed_versions())
        with (
            evaluation_mode(model),
            torch.no_grad(),
            _autocast(config, device.type, uses_kernels),
            mixers.computed_on(device_type, model, config.train_args.mixed_dtype),
        ):
            packing = check.choose()
        if packing.rows == "segments" and packing.reason in (choice.reason, _OWN_ATTENTION):
            is_own = packing.reason == _OWN_ATTENTION
            kernel = None if is_own else choice.kernel
            stored.write({"kernel": kernel, "in_kernels": packing.in_kernels})
    if packing.rows == "segments":
        mixers.install(base, partial(outside_graphs, base), packing.in_kernels)
    return packing


def _restored(stored: StoredCheck, base: Any, choice: AttentionChoice) -> PackingChoice | None:
    """Return the stored choice, with its attention installed, or None if there is none."""
    result = stored.read()
    if result is None:
        return None
    kinds, in_kernels = _kinds(mixers.find_mixers(base)), bool(result["in_kernels"])
    if result["kernel"] is None:
        return PackingChoice("segments", _OWN_ATTENTION, None, kinds, in_kernels)
    if attention.install(base, choice.kernel) is None:
        return None
    return PackingChoice("segments", choice.reason, None, kinds, in_kernels)


def _kinds(recurrent: Sequence[torch.nn.Module]) -> tuple[str, ...]:
    return tuple(sorted({type(mixer).__name__ for mixer in recurrent}))


@dataclass
class _Check:
    """A test of how samples may share a row, which runs in evaluation mode.

    Args:
        recurrent: the recurrent and convolution layers of the model.
        row: the samples of the check.
        divides_rows: as for :func:`choose_packing`.
    """

    model: Any
    config: Config
    choice: AttentionChoice
    device_type: str
    recurrent: Sequence[torch.nn.Module]
    row: CheckedRow
    divides_rows: bool

    def __post_init__(self) -> None:
        self.base = base_model(self.model)

    def choose(self) -> PackingChoice:
        """Return the choice, with its attention installed."""
        try:
            logits = [self.model(**sample).logits for sample in self.row.samples]
        except ROW_ERRORS as error:
            if not self.row.is_inside:
                raise
            return PackingChoice("none", _OWN_ATTENTION, not_computed(error))
        alone = torch.cat(logits, dim=1).float()
        has_kernels = mixers.have_kernels(self.recurrent)
        for in_kernels in (True, False) if has_kernels else (False,):
            mixers.install(self.base, partial(outside_graphs, self.base), in_kernels)
            reason = None
            if not in_kernels or self._kernels_keep_apart():
                reason = self._attention(alone, in_kernels)
            mixers.uninstall(self.base)
            if reason is not None:
                kinds = _kinds(self.recurrent)
                return PackingChoice("segments", reason, None, kinds, in_kernels)
        if self.divides_rows:
            if self._agrees_by_gather(alone):
                return PackingChoice("segments", _DIVIDED)
        elif self._agrees(alone, with_segments=False):
            return PackingChoice("positions", _OWN_ATTENTION)
        return PackingChoice("none", _OWN_ATTENTION, self._explain())

    def _agrees_by_gather(self, alone: torch.Tensor) -> bool:
        """Return whether attention for divided rows keeps samples apart: on this rank alone."""
        device = self.row.row["input_ids"].device  # type: ignore[union-attr]
        place = ContextPlace(Communicator(RankEnv(0, 1, 0, 1), device))
        try:
            install_context(self.base, place, GATHER, SDPA)
        except ConfigError:
            return False
        agrees = self._agrees(alone)
        attention.uninstall(self.base)
        return agrees

    def _explain(self) -> UserText:
        """Return why samples cannot share a row."""
        row = dict(self.row.row)
        kinds = {
            name: torch.zeros_like(value)
            for name, value in row.items()
            if isinstance(value, torch.Tensor) and name.endswith("token_type_ids")
        }
        if kinds and self._depends_on(row, kinds):
            # Positions are given, so only the mask depends on the kinds of the tokens.
            return UserText(
                "tokens of an image attend to each other in both directions, and its mask does not"
                " do this in a row of several samples",
                code="images-attend-both-ways",
            )
        return explain_mixing(self.base, self.row.samples, row)

    def _depends_on(self, row: Mapping[str, ModelInput], changed: Mapping[str, ModelInput]) -> bool:
        """Return whether the logits of a row change with some of the model's arguments."""
        try:
            before, after = (self.model(**{**row, **each}).logits.float() for each in ({}, changed))
        except ROW_ERRORS:
            return False
        return not rows_agree(after, [before])

    def _attention(self, alone: torch.Tensor, in_kernels: bool) -> str | None:
        """Install an attention with which samples share a row, and return why it was chosen; None
        if there is none. Without recurrent layers, the model's own attention is not tried.

        Args:
            alone: logits of the samples in rows of their own.
            in_kernels: whether recurrent layers are computed by kernels of other packages.
        """
        for kernel in dict.fromkeys((self.choice.kernel, SDPA)):
            if attention.install(self.base, kernel) is None:
                continue
            is_fused = in_kernels or kernel != SDPA
            with _attention_on(self.device_type, alone, self.config, kernel):
                if self._agrees(alone, is_fused=is_fused):
                    if kernel == self.choice.kernel:
                        return self.choice.reason
                    return f"{self.choice.kernel} does not compute this model's attention"
            attention.uninstall(self.base)
        if self.recurrent and self._agrees(alone, is_fused=in_kernels):
            return _OWN_ATTENTION
        return None

    def _agrees(
        self, expected: torch.Tensor, with_segments: bool = True, is_fused: bool = False
    ) -> bool:
        try:
            result = self.row.logits(self.model, with_segments)
        except ROW_ERRORS:
            return False
        if not torch_compat.has_values(result):
            return True
        dtypes = {result.dtype, next(self.model.parameters()).dtype}
        # A fused kernel computes in 16 bits, also where the rest of the model computes in float32.
        is_exact = dtypes == {torch.float32} and not is_fused
        tolerance = TOLERANCE if is_exact else 5e-2
        limit = tolerance * expected.abs().max().clamp(min=1.0)
        return bool((result.float() - expected).abs().max() <= limit)

    def _kernels_keep_apart(self) -> bool:
        """Return whether the kernels of recurrent layers compute a row as they compute its samples,
        also those that layers call in training only.

        The layers are called by themselves, because kernels compute in 16 bits: the logits would
        show a mixture less clearly than rounding.
        """
        generator = torch.Generator().manual_seed(0)
        width = int(self.base.config.get_text_config().hidden_size)
        segments = self.row.segments
        lengths = segments["segment_lengths"]
        for mixer in {type(mixer): mixer for mixer in self.recurrent}.values():
            like = next(mixer.parameters())
            hidden = torch.randn(1, sum(lengths), width, generator=generator)
            hidden = hidden.to(like.device, like.dtype)
            for is_training in (False, True):
                mixer.training = is_training
                try:
                    row = packed_row.with_segments(segments, mixer, hidden)
                    alone = [mixer(part) for part in hidden.split(lengths, dim=1)]
                except ROW_ERRORS:
                    return False
                finally:
                    mixer.training = False
                if torch_compat.has_values(row) and not rows_agree(row, alone):
                    return False
        return True


def _autocast(config: Config, device_type: str, uses_kernels: bool) -> AbstractContextManager[Any]:
    """Return autocast for kernels, which may not compute in float32, and for modules that are
    trained in full in float32 between frozen ones in 16 bits.

    Args:
        uses_kernels: whether some layer is computed by a fused kernel on an accelerator.
    """
    low, lora = config.train_args.mixed_dtype, config.lora
    mixes_dtypes = lora.enable and bool(lora.modules_to_save or config.adds_tokens)
    if low is None or not ((uses_kernels and device_type != "cpu") or mixes_dtypes):
        return nullcontext()
    return torch.autocast(device_type, dtype=getattr(torch, low))


@contextmanager
def _attention_on(
    device_type: str, like: torch.Tensor, config: Config, kernel: str
) -> Iterator[None]:
    """Compute the attention that is installed on the device that the run trains on within the
    block, if the model is still on the CPU.

    Args:
        like: a result of the model, whose device is the model's.
    """
    if like.device.type == device_type or not torch_compat.has_values(like):
        yield
        return
    device = torch.device(device_type)

    def compute(
        installed: Any, module: torch.nn.Module, *states: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        query = states[0]
        states = tuple(_moved(state, device) for state in states)
        options = {name: _moved(option, device) for name, option in options.items()}
        with _autocast(config, device_type, kernel != SDPA):
            result, _ = installed(module, *states, **options)
        return result.to(query.device, query.dtype), None

    with attention.wrapped(compute):
        yield


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _row_of_texts(model: Any, device: torch.device, lengths: Sequence[int]) -> CheckedRow:
    """Return texts of random tokens."""
    vocabulary = int(getattr(model.config.get_text_config(), "vocab_size", 0))
    generator = torch.Generator().manual_seed(0)
    ids = [
        torch.randint(0, max(vocabulary, 2), (1, length), generator=generator).to(device)
        for length in lengths
    ]
    positions = [torch.arange(length, device=device) for length in lengths]
    row: dict[str, ModelInput] = {
        "input_ids": torch.cat(ids, dim=1),
        "position_ids": torch.cat(positions).unsqueeze(0),
        "use_cache": False,
    }
    samples: list[dict[str, ModelInput]] = [
        {"input_ids": tokens, "use_cache": False} for tokens in ids
    ]
    return CheckedRow(samples, row, segment_inputs(lengths, device))
