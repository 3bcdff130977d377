"""The noise on embeddings: its size, and that it depends on the sample and the epoch only."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

from paceline.data.collate import collate_packed, collate_padded
from paceline.data.loader import train_steps
from paceline.data.loader_process import LoaderOptions
from paceline.data.order.samples import SampleOrder
from paceline.data.text.token_dataset import TokenDataset, TokenWriter
from paceline.models.transforms.embedding_noise import add_embedding_noise, noisy_embeddings

ALPHA, WIDTH = 5.0, 64


def make_dataset(folder: Path) -> TokenDataset:
    lengths = [3 + 7 * (number % 5) for number in range(24)]
    writer = TokenWriter(folder)
    for number, length in enumerate(lengths):
        ids = np.full(length, number, dtype=np.int32)
        mask = np.ones(length, np.bool_)
        columns = {"input_ids": [ids.tobytes()], "labels_mask": [mask.tobytes()]}
        writer.extend(columns, [length], [length - 1])
    writer.close()
    return TokenDataset(folder, with_seeds=True)


def embedding() -> nn.Embedding:
    module = nn.Embedding(30, WIDTH)
    nn.init.zeros_(module.weight)
    add_embedding_noise(module, ALPHA)
    return module


def noise_of(batch) -> torch.Tensor:
    with torch.no_grad(), noisy_embeddings(batch["noise_keys"], batch["noise_scales"]):
        return embedding()(batch["input_ids"])


def noise_by_sample(dataset, collate, world: int, workers: int = 0) -> dict[tuple[int, int], bytes]:
    """Return the noise of each sample in each of two epochs."""
    order = SampleOrder(len(dataset), 8, seed=3)
    result = {}
    for rank in range(world):
        steps = train_steps(
            dataset, order, collate, rank=rank, world_size=world, accumulation=1, first_step=0,
            last_step=2 * order.steps_per_epoch, options=LoaderOptions(num_workers=workers),
        )  # fmt: skip
        for number, step in enumerate(steps):
            ids, noise = step[0].data["input_ids"], noise_of(step[0].data)
            for sample in ids.unique().tolist():
                chosen = noise[ids == sample]
                chosen = chosen[chosen.abs().sum(1) > 0]  # without padding
                result[number // order.steps_per_epoch, sample] = chosen.numpy().tobytes()
    return result


def test_noise_depends_on_sample_and_epoch_only(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path)

    def padded(samples):
        return collate_padded(samples, pad_token_id=29)

    expected = noise_by_sample(dataset, collate_packed, world=1)
    assert len(set(expected.values())) == 48
    assert noise_by_sample(dataset, collate_packed, world=2) == expected
    assert noise_by_sample(dataset, collate_packed, world=1, workers=1) == expected
    result = noise_by_sample(dataset, padded, world=2)
    assert {key: value for key, value in result.items() if key[1] != 29} == expected


def test_noise_is_uniform_and_scaled_by_length_and_width(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path)
    batch = collate_packed([dataset[index] for index in range(24)])
    noise, start = noise_of(batch)[0], 0
    values = []
    for length in dataset.lengths.tolist():
        limit = ALPHA / (length * WIDTH) ** 0.5
        values.append(noise[start : start + length].flatten() / limit)
        start += length
    scaled = torch.cat(values).double()
    assert float(scaled.abs().max()) <= 1
    counts = torch.histc(scaled, 10, -1, 1)
    assert float((counts / len(scaled) - 0.1).abs().max()) < 0.01
    assert abs(float(scaled.mean())) < 0.01
    # neighbors are independent, along tokens and along dimensions
    grid = torch.cat(values)[: 31 * WIDTH].view(-1, WIDTH).double()
    for left, right in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1])):
        assert abs(float((left * right).mean())) < 0.03


def test_no_noise_without_training() -> None:
    module, ids = embedding(), torch.arange(4)[None]
    keys, scales = torch.arange(4, dtype=torch.int32)[None], torch.ones(1, 4)
    assert not module(ids).any()
    with noisy_embeddings(keys, scales):
        assert module(ids).any()
        assert not module.eval()(ids).any()
