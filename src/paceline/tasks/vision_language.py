"""`task: sft` with a vision-language model."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.texts import UserText
from paceline.data.collate import TokenBatch, collate_padded, find_tensors, pad_tokens
from paceline.data.encoding.prepare import PreparedTokens, prepare_tokens
from paceline.data.kinds.image import ImageKind, PixelTransform, has_images
from paceline.data.text.token_dataset import TokenSample
from paceline.data.vision_language.images import (
    ImageProcessor,
    ImageTextSample,
    join_inputs,
    load_processor,
)
from paceline.models.blocks import base_model
from paceline.models.builtin import resolve_model
from paceline.models.language import copy_processor
from paceline.models.vision.parts import Part, frozen_parts
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

    Rows are padded, because the positions of images in a packed row depend on the model. Samples
    without images are packed if the config asks for it.
    """

    is_language_model = False  # its activations are not predicted

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.packed = False
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
        folders = (tokens.train_folder, tokens.eval_folder)
        if any(folder is not None and has_images(folder) for folder in folders):
            prepared.image_backend = self._load_processor(tokens.tokenizer_path).backend
        elif vision_type(self.config.model) in TEXT_TYPES:
            prepared.notices.append(_no_images_notice(self.config))
        return prepared

    def _check_packing(self, tokens: PreparedTokens) -> None:
        """Raise ConfigError if rows that are to be packed have images, or would have a blank
        one."""
        if not self._asks_for_packing:
            return
        folders = (tokens.train_folder, tokens.eval_folder)
        why = fix = ""
        if any(folder is not None and has_images(folder) for folder in folders):
            why, fix = "samples with images do not share a row", "leave it out"
        elif self._trains_vision:
            why = "samples without images do not train the vision tower and the projector"
            fix = "set `vision.freeze_vision_tower: true` and `freeze_multi_modal_projector: true`"
        if why:
            raise ConfigError(
                "`train_args.packing: true` is not supported with the vision-language model"
                " `{model}`: {why}",
                code="packing-with-vision-language",
                fix=fix,
                model=self.config.model,
                why=why,
            )

    @property
    def _asks_for_packing(self) -> bool:
        """Whether samples without images are to share a row."""
        args = self.config.train_args
        return args.packing is True or args.packs_rows

    def build_datasets(self) -> tuple[Any, Any | None]:
        tokens: PreparedTokens = self._handle
        if self._asks_for_packing:  # The data have no images.
            self.packed = True
            return super().build_datasets()
        return tokens.open(ImageKind.columns, PixelTransform(self._processor))

    @cached_property
    def _processor(self) -> ImageProcessor:
        return self._load_processor(self._handle.tokenizer_path)

    def _load_processor(self, folder: str) -> ImageProcessor:
        config = self.config
        return load_processor(Path(folder), config.vision.max_pixels, config.trust_remote_code)

    def setup(self, model: Any) -> list[Notice]:
        notices = super().setup(model)
        name = vision_type(self.config.model)
        if name in TESTED_TYPES:
            return notices
        return [*notices, check_untested(self, model, str(name), self._first_with_images())]

    def _first_with_images(self) -> list[TokenSample]:
        """Return the first sample with images and a sample beside it; empty if there is none."""
        tokens: PreparedTokens = self._handle
        columns = tokens.open(ImageKind.columns)[0]
        with_images = (index for index in range(len(columns)) if columns[index].get("image"))
        first = next(with_images, None)
        if first is None or self.packed:
            return []
        train = self.build_datasets()[0]
        return [train[index] for index in range(first, min(first + 2, len(columns)))]

    def collate(self, samples: Sequence[TokenSample]) -> TokenBatch:
        """Return the samples as padded rows, with the inputs of the model for their images.

        If the vision tower or the projector is trained, a batch without images gets a row with a
        blank image and without label tokens, so that all ranks compute the same gradients.
        """
        if self.packed:
            batch = cast(VisionBatch, super().collate(samples))
            types = torch.zeros_like(batch["input_ids"])
            batch["vision_inputs"] = dict.fromkeys(self._processor.token_inputs, types)
            return batch
        if self._trains_vision and not any(cast(ImageTextSample, row)["pixels"] for row in samples):
            samples = [*samples, self._processor.blank_sample()]
        batch = cast(VisionBatch, collate_padded(samples, self._handle.pad_token_id))
        pixels = [cast(ImageTextSample, sample)["pixels"] for sample in samples]
        batch["vision_inputs"] = join_inputs(pixels, self._processor.row_inputs)
        if names := self._processor.token_inputs:
            rows = (self._processor.token_types(sample["input_ids"]) for sample in samples)
            types = torch.from_numpy(pad_tokens(rows, 0))
            batch["vision_inputs"].update(dict.fromkeys(names, types))
        return batch

    def _inputs(self, batch: TokenBatch) -> Any:
        inputs = cast(VisionBatch, batch).get("vision_inputs", {})
        return {**super()._inputs(batch), **self._converted(inputs)}

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


def _no_images_notice(config: Config) -> Notice:
    text = UserText(
        "data: no row has an image; `{model}` is trained as a vision-language model on texts. With"
        " `vision.text_only: true` it is trained as a causal language model, with packed rows and"
        " generated answers",
        code="no-row-with-images",
        model=config.model,
    )
    return "info", text
