"""`task: sft` with a vision-language model."""

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.texts import UserText
from paceline.data.collate import (
    SegmentInputs,
    TokenBatch,
    collate_packed,
    collate_padded,
    find_tensors,
    map_tensors,
    pad_tokens,
    segment_inputs,
)
from paceline.data.encoding.prepare import PreparedTokens, prepare_tokens
from paceline.data.kinds.image import ImageKind, PixelTransform, has_images
from paceline.data.text.token_dataset import TokenSample
from paceline.data.vision_language.images import (
    ImageProcessor,
    ImageTextSample,
    join_inputs,
    load_processor,
)
from paceline.data.vision_language.packed import example_samples, join_in_row
from paceline.distributed import torch_compat
from paceline.models import packed_row
from paceline.models.blocks import base_model
from paceline.models.builtin import resolve_model
from paceline.models.checks.packing import (
    CheckedRow,
    PackingChoice,
    choose_packing,
    identity_of,
)
from paceline.models.language import copy_processor
from paceline.models.packed_row import ModelInput
from paceline.models.vision.parts import Part, frozen_parts
from paceline.models.vision.positions import ImagePositions, image_positions
from paceline.models.vision.types import TESTED_TYPES, TEXT_TYPES, check_type, vision_type
from paceline.tasks.base import Notice, Prepared
from paceline.tasks.language import LanguageTask
from paceline.tasks.vision_check import check_untested


class VisionBatch(TokenBatch, total=False):
    """A batch with further inputs of the model by name: for its images, and for their tokens."""

    vision_inputs: dict[str, torch.Tensor]


class VisionLanguageTask(LanguageTask):
    """Trains a vision-language model of Hugging Face on chats with images, with loss on the
    answers.

    Samples share a row if a test with images shows that the model keeps them apart; otherwise rows
    are padded.
    """

    is_language_model = False  # its activations are not predicted

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._positions: ImagePositions | None = None
        frozen = frozen_parts(config)
        self._trains_vision = Part.TOWER not in frozen or Part.PROJECTOR not in frozen

    def check(self) -> None:
        check_type(self.config.model)
        super().check()
        args = self.config.train_args
        refused = (
            (
                self.config.tokenizer,
                "`tokenizer`",
                "leave `tokenizer` out: the processor belongs to the model",
            ),
            (
                self.config.lora.enable and self.config.lora.method == "vera",
                "`lora.method: vera`",
                "set `lora.method: lora`",
            ),
            (args.torch_compile, "`train_args.torch_compile: true`", "leave it out"),
            (
                args.neftune_noise_alpha is not None,
                "`train_args.neftune_noise_alpha`",
                "leave it out",
            ),
            (
                self.config.evaluation.lm_eval is not None,
                "`evaluation.lm_eval`",
                "leave `evaluation.lm_eval` out",
            ),
            (self.config.streaming is True, "`streaming: true`", "leave `streaming` out"),
        )
        for applies, what, fix in refused:
            if applies:
                raise ConfigError(
                    "{subject} is not supported with the vision-language model `{model}`",
                    code="setting-with-vision-language",
                    fix=fix,
                    subject=what,
                    model=self.config.model,
                )

    def prepare(self) -> Prepared:
        tokens = prepare_tokens(self.config, "vision", resolve_model, self.num_prepare_workers)
        self._check_packing(tokens)
        prepared = self._prepared_from(tokens)
        if _have_images(tokens):
            prepared.image_backend = self._load_processor(tokens.tokenizer_path).backend
        elif vision_type(self.config.model) in TEXT_TYPES:
            prepared.notices.append(_no_images_notice(self.config))
        return prepared

    def _check_packing(self, tokens: PreparedTokens) -> None:
        """Raise ConfigError if samples with images are to be cut."""
        if self.config.train_args.packing_strategy == "wrapped" and _have_images(tokens):
            raise ConfigError(
                "`train_args.packing_strategy: wrapped` is not supported with rows with images: it"
                " cuts samples where a row is full, and the tokens of an image cannot be cut",
                code="images-in-wrapped-rows",
                fix="set `train_args.packing_strategy: bfd`",
            )

    def build_datasets(self) -> tuple[Any, Any | None]:
        tokens: PreparedTokens = self._handle
        return tokens.open(ImageKind.columns, PixelTransform(self._processor))

    @cached_property
    def _processor(self) -> ImageProcessor:
        return self._load_processor(self._handle.tokenizer_path)

    def _load_processor(self, folder: str) -> ImageProcessor:
        config = self.config
        return load_processor(Path(folder), config.vision.max_pixels, config.trust_remote_code)

    def setup(self, model: Any) -> list[Notice]:
        self._positions = image_positions(model)
        notices = super().setup(model)
        name = vision_type(self.config.model)
        if name in TESTED_TYPES:
            return notices
        return [*notices, check_untested(self, model, str(name), self._first_with_images())]

    def _choose_packing(self, model: Any) -> PackingChoice:
        first = next(model.parameters())
        packed_row.pass_segments(base_model(model).get_decoder())
        row = partial(self._checked_row, first)
        return choose_packing(model, first.device, self.config, self.device_type, row)

    def _checked_row(self, like: torch.Tensor, lengths: Sequence[int]) -> CheckedRow:
        """Return samples with images, if the data have images, on the device of a tensor. Logits of
        images are left out, because there may be many."""
        has_images = self._trains_vision or _have_images(self._handle)
        processor = self._processor
        # Towers read the sizes of images, which have no values in a simulation.
        with_images = has_images and torch_compat.has_values(like)
        samples = example_samples(processor, lengths, with_images)

        def inputs(batch: TokenBatch, ids: np.ndarray) -> dict[str, ModelInput]:
            result = {**self._inputs(batch)}
            if self.picks_logits:
                texts = np.flatnonzero(~processor.are_of_images(ids))
                result["logits_to_keep"] = torch.from_numpy(texts)
            return result

        def moved(value: dict[str, ModelInput]) -> dict[str, ModelInput]:
            result: dict[str, ModelInput] = map_tensors(
                value, lambda tensor: tensor.to(like.device)
            )
            return result

        batch = self._with_images(collate_packed(samples), samples)
        segments = segment_inputs(batch["segment_lengths"], like.device)
        row = inputs(batch, np.concatenate([sample["input_ids"] for sample in samples]))
        alone = [inputs(self.padded_batch([each]), each["input_ids"]) for each in samples]
        return CheckedRow(
            [moved(each) for each in alone], moved(row), segments, identity_of(row), is_inside=True
        )

    def _first_with_images(self) -> list[TokenSample]:
        """Return the first sample with images and a sample beside it; empty if there is none."""
        tokens: PreparedTokens = self._handle
        columns = tokens.open(ImageKind.columns)[0]
        with_images = (index for index in range(len(columns)) if columns[index].get("image"))
        first = next(with_images, None)
        if first is None:
            return []
        train = self.build_datasets()[0]
        return [train[index] for index in range(first, min(first + 2, len(columns)))]

    def collate(self, samples: Sequence[TokenSample]) -> TokenBatch:
        """Return the samples with the inputs of the model for their images.

        If the vision tower or the projector is trained, a batch without images gets a sample with a
        blank image and without label tokens, so that all ranks compute the same gradients.
        """
        if self._trains_vision and not any(map(_pixels, samples)):
            samples = [*samples, self._processor.blank_sample()]
        return self._with_images(super().collate(samples), samples)

    def padded_batch(self, samples: Sequence[TokenSample]) -> TokenBatch:
        """Return the samples as padded rows, also if training packs them."""
        return self._with_images(collate_padded(samples, self._handle.pad_token_id), samples)

    def _with_images(self, batch: TokenBatch, samples: Sequence[TokenSample]) -> TokenBatch:
        """Add the inputs of the model for the images of the samples, and for their tokens."""
        processor, pixels = self._processor, [_pixels(sample) for sample in samples]
        is_packed = "segment_lengths" in batch
        inputs: dict[str, torch.Tensor] = {}
        if any(pixels):
            join = join_in_row if is_packed else join_inputs
            inputs = join(pixels, processor.row_inputs)
        if names := processor.token_inputs:
            types = [processor.token_types(sample["input_ids"]) for sample in samples]
            rows = [np.concatenate(types)] if is_packed else types
            inputs.update(dict.fromkeys(names, torch.from_numpy(pad_tokens(rows, 0))))
            if is_packed and self._positions is not None:
                grids = [row.get("image_grid_thw") for row in pixels]
                of_samples = [torch.from_numpy(each) for each in types]
                batch["position_ids"] = self._positions.row(of_samples, grids)
        with_images = cast(VisionBatch, batch)
        with_images["vision_inputs"] = inputs
        return with_images

    def _inputs(self, batch: TokenBatch) -> Any:
        inputs = {**super()._inputs(batch)}
        for name in SegmentInputs.__annotations__:  # The language model gets them.
            inputs.pop(name, None)
        return inputs | self._converted(cast(VisionBatch, batch).get("vision_inputs", {}))

    def _loss(self, model: Any, batch: TokenBatch, counts_correct: bool) -> tuple[Any, Any]:
        compute = super()._loss
        if not self._passes_segments:
            return compute(model, batch, counts_correct)
        segments = SegmentInputs(
            segment_lengths=batch["segment_lengths"],
            cu_seqlens=batch["cu_seqlens"],
            max_seqlen=batch["max_seqlen"],
        )
        result: tuple[Any, Any] = packed_row.with_segments(
            segments, compute, model, batch, counts_correct
        )
        return result

    def _converted(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return inputs in the data type of the weights. Some processors return pixels in bfloat16,
        which their models do not convert."""
        args = self.config.train_args
        dtype = getattr(torch, args.weight_dtype)
        if self.config.lora.enable:
            dtype = getattr(torch, args.mixed_dtype or "float32")
        return {
            name: value.to(dtype) if value.is_floating_point() and value.itemsize < 4 else value
            for name, value in inputs.items()
        }

    def prepare_trial(self, model: Any) -> None:
        if self.packed:
            self._positions = image_positions(model)
            self._choose_rows(self._choose_packing(model))

    def trial_loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Run the vision tower and the language model one after the other: models read values where
        they put the features of images into the text."""
        inputs: Mapping[str, torch.Tensor] = batch.get("vision_inputs", {})
        of_tokens = {name: inputs[name] for name in self._processor.token_inputs if name in inputs}
        texts = {name: torch.zeros_like(value) for name, value in of_tokens.items()}
        loss = super().trial_loss(model, {**batch, "vision_inputs": texts})
        # Towers read the sizes of the images from the other tensors.
        pixels = {
            name: value.to("meta") if name.startswith("pixel_") else value
            for name, value in inputs.items()
            if name not in of_tokens
        }
        if not pixels:
            return loss
        base: Any = base_model(model)
        features = base.get_image_features(**self._converted(pixels))
        return loss + sum(tensor.sum() for tensor in find_tensors(dict(features)))

    def prompt_inputs(self, sample: TokenSample, num_tokens: int) -> dict[str, torch.Tensor] | None:
        pixels = cast(ImageTextSample, sample).get("pixels")
        if not pixels:
            return {}
        ids = sample["input_ids"]
        if self._processor.has_image_tokens(ids[num_tokens:]):
            return None
        inputs = self._converted(pixels)
        if names := self._processor.token_inputs:
            types = torch.from_numpy(self._processor.token_types(ids[:num_tokens])).unsqueeze(0)
            inputs.update(dict.fromkeys(names, types))
        return inputs

    def save_model(self, model: Any, folder: Path) -> None:
        super().save_model(model, folder)
        if self.prepared is not None:
            copy_processor(Path(self.prepared.handle.tokenizer_path), folder)


def _have_images(tokens: PreparedTokens) -> bool:
    folders = (tokens.train_folder, tokens.eval_folder)
    return any(folder is not None and has_images(folder) for folder in folders)


def _pixels(sample: TokenSample) -> Mapping[str, torch.Tensor]:
    """Return the inputs for the images of a sample. A piece of a text has none."""
    return cast(ImageTextSample, sample).get("pixels", {})


def _no_images_notice(config: Config) -> Notice:
    text = UserText(
        "data: no row has an image; `{model}` is trained as a vision-language model on texts. With"
        " `vision.text_only: true` it is trained as a causal language model, with packed rows and"
        " generated answers",
        code="no-row-with-images",
        model=config.model,
    )
    return "info", text
