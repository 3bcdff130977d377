"""Language models: packed, padded and separate samples give the same loss and gradients."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config.schema import Config
from paceline.data.collate import noise_inputs
from paceline.data.text.token_dataset import TokenDataset
from paceline.tasks.language import LanguageTask

MODEL = "builtin:qwen2-micro"


@pytest.fixture(autouse=True)
def compiler_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch sets this variable on first use.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def make_task(
    task: str = "sft", dataset: str = "builtin:python-docs#12", **keys: Any
) -> tuple[LanguageTask, Any, list[Any]]:
    """Return (task, model ready to train, samples)."""
    args = {"max_length": 96, **keys.pop("train_args", {})}
    config = Config(model=MODEL, dataset=dataset, task=task, train_args=args, **keys)
    language_task = LanguageTask(config)
    language_task.check()
    language_task.prepared = language_task.prepare()
    train, _ = language_task.build_datasets()
    assert isinstance(train, TokenDataset)
    torch.manual_seed(0)
    model = language_task.build_model()
    language_task.setup(model)
    return language_task, model, [train[index] for index in range(len(train))]


def loss_and_gradients(
    task: LanguageTask, model: Any, samples: list[Any]
) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = task.loss(model, task.collate(samples))
    loss.backward()
    return loss.item(), {
        name: param.grad.clone()
        for name, param in model.named_parameters()
        if param.grad is not None
    }


def assert_gradients_close(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    assert set(actual) == set(expected) != set()
    for name, gradient in actual.items():
        assert (
            float((gradient - expected[name]).abs().max())
            <= 1e-5 * float(gradient.abs().max()) + 1e-6
        ), name


@pytest.mark.parametrize("lora", [False, True])
def test_packed_and_padded_rows_give_same_loss_and_gradients(lora: bool) -> None:
    keys: dict[str, Any] = {"lora": {"enable": lora, "dropout": 0.0}}
    packed, packed_model, samples = make_task(train_args={"packing": True}, **keys)
    padded, padded_model, padded_samples = make_task(train_args={"packing": False}, **keys)
    assert packed.packed
    assert not padded.packed
    # With samples of one length, the comparison would be trivial.
    assert len({len(sample["input_ids"]) for sample in samples}) > 3
    assert all(
        (sample["input_ids"] == other["input_ids"]).all()
        for sample, other in zip(samples, padded_samples, strict=True)
    )
    for (name, param), (_, other) in zip(
        packed_model.named_parameters(), padded_model.named_parameters(), strict=True
    ):
        if "lora_B" in name:  # initialized to zero, where the gradient of lora_A vanishes
            torch.nn.init.normal_(
                param, std=0.02, generator=torch.Generator().manual_seed(param.numel())
            )
            other.data.copy_(param.data)
        assert torch.equal(param, other)
    left = loss_and_gradients(packed, packed_model.train(), samples)
    right = loss_and_gradients(padded, padded_model.train(), samples)
    assert left[0] == pytest.approx(right[0], rel=1e-5)
    assert_gradients_close(left[1], right[1])
    assert packed.collate(samples)["input_ids"].shape[0] == 1
    assert padded.collate(samples)["input_ids"].shape == (
        len(samples),
        max(len(sample["input_ids"]) for sample in samples),
    )


def test_samples_in_packed_row_do_not_interact() -> None:
    task, model, samples = make_task()
    assert task.packed
    separate = [loss_and_gradients(task, model, [sample]) for sample in samples]
    together = loss_and_gradients(task, model, samples)
    assert together[0] == pytest.approx(sum(loss for loss, _ in separate), rel=1e-5)
    assert_gradients_close(
        together[1],
        {name: sum(gradients[name] for _, gradients in separate) for name in together[1]},
    )  # type: ignore[misc]
    reversed_order = loss_and_gradients(task, model, samples[::-1])
    assert reversed_order[0] == pytest.approx(together[0], rel=1e-5)
    assert_gradients_close(reversed_order[1], together[1])


@pytest.mark.parametrize("packing", [True, False])
def test_weights_of_rows_multiply_their_loss_and_their_count(packing: bool, tmp_path: Path) -> None:
    weights = [0.5, 0.0, 3.0, 1.25]
    rows = [
        {"prompt": f"What is {n}?", "completion": f"It is {'very ' * n}{n}.", "w": weight}
        for n, weight in enumerate(weights)
    ]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"path": str(file), "columns": {"loss_weight": "w"}}
    task, model, samples = make_task(dataset=source, train_args={"packing": packing})
    alone = [{**sample, "weight": 1.0} for sample in samples]
    losses = [task.loss(model, task.collate([sample])).item() for sample in alone]
    counts = [task.count(task.collate([sample])) for sample in alone]
    batch = task.collate(samples)
    pairs = list(zip(losses, counts, weights, strict=True))
    expected = sum(loss * weight for loss, _, weight in pairs)
    assert task.loss(model, batch).item() == pytest.approx(expected, rel=1e-5)
    assert task.count(batch) == sum(count * weight for _, count, weight in pairs)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("chunk_size", [0, 64])
def test_weights_are_not_rounded_by_autocast(chunk_size: int, packing: bool) -> None:
    args = {"packing": packing, "loss_chunk_size": chunk_size}
    task, model, samples = make_task(train_args=args)
    weighted = [{**sample, "weight": 1.0} for sample in samples]
    with torch.autocast("cpu", torch.bfloat16):
        expected = task.loss(model, task.collate(samples)).item()
        loss = task.loss(model, task.collate(weighted)).item()
    assert loss == pytest.approx(expected, rel=1e-6)


def test_loss_matches_transformers() -> None:
    task, model, samples = make_task()
    reference_model = make_task(train_args={"packing": False})[1]
    for sample in samples[:3]:
        ids = torch.from_numpy(sample["input_ids"].astype("int64")).unsqueeze(0)
        mask = torch.from_numpy(sample["labels_mask"].astype(bool)).unsqueeze(0)
        with torch.no_grad():
            expected = reference_model(input_ids=ids, labels=ids.masked_fill(~mask, -100)).loss
            actual = task.loss(model, task.collate([sample]))
        count = int(mask[0, 1:].sum())
        assert task.count(task.collate([sample])) == count
        assert float(actual) / count == pytest.approx(float(expected), rel=1e-5)


def test_batch_counts_match_tokenized_data() -> None:
    packed, _, samples = make_task()
    padded, _, _ = make_task(train_args={"packing": False})
    tokens = sum(len(sample["input_ids"]) for sample in samples)
    labels = sum(int(sample["labels_mask"][1:].sum()) for sample in samples)
    for task in (packed, padded):
        batch = task.collate(samples)
        # Padding counts as neither tokens nor labels.
        assert (task.num_tokens(batch), task.count(batch)) == (tokens, labels)
        assert task.prepared is not None
        assert (task.prepared.train_tokens, task.prepared.label_tokens) == (tokens, labels)
        assert task.prepared.num_train == len(samples)


def test_pretraining_has_loss_on_every_token_but_the_first(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"Line {n}. " * (n + 1)}) + "\n" for n in range(5))
    )
    task, model, samples = make_task("pretrain", str(tmp_path / "a.jsonl"))
    batch = task.collate(samples)
    # The first token of each sample has no loss.
    assert task.count(batch) == task.num_tokens(batch) - len(samples)
    together = loss_and_gradients(task, model, samples)
    assert together[0] == pytest.approx(
        sum(loss_and_gradients(task, model, [sample])[0] for sample in samples), rel=1e-5
    )


@pytest.mark.parametrize(
    ("model", "lora", "rate"),
    [
        (MODEL, False, 1e-3),
        (MODEL, True, 1e-4),
        ("./folder", False, 2e-5),
        ("./folder", True, 1e-4),
    ],
)
def test_default_learning_rate(model: str, lora: bool, rate: float) -> None:
    config = Config(model=model, dataset="d", lora={"enable": lora})
    assert LanguageTask(config).default_learning_rate == rate


@pytest.mark.parametrize("packing", [pytest.param(True, marks=pytest.mark.soak), False])
def test_smoothing_and_noise_change_training_but_not_evaluation(packing: bool) -> None:
    plain, plain_model, samples = make_task(train_args={"packing": packing})
    settings = {"packing": packing, "label_smoothing_factor": 0.1, "neftune_noise_alpha": 5}
    task, model, noisy_samples = make_task(train_args=settings)
    batch, noisy_batch = plain.collate(samples), task.collate(noisy_samples)
    with torch.no_grad():
        expected = plain.evaluate(plain_model.eval(), batch)["loss"]
        assert torch.equal(task.evaluate(model.eval(), noisy_batch)["loss"], expected)
        smoothed = task.loss(model.train(), batch)  # without seeds, so without noise
        noisy = task.loss(model, noisy_batch)
        assert torch.equal(noisy, task.loss(model, noisy_batch))
    # The logits of an untrained model are nearly equal, so smoothing changes little.
    assert 1e-5 < abs(float(smoothed / expected) - 1) < 1e-2
    assert 1e-7 < abs(float(noisy / smoothed) - 1) < 1e-2


def test_noise_of_packed_rows_is_that_of_their_samples_and_pieces() -> None:
    task, model, _ = make_task(train_args={"neftune_noise_alpha": 5})
    dataset, _ = task.build_datasets()
    assert not dataset.deterministic

    def read(index: int, *span: int) -> Any:
        random.seed(index)  # as the loader does for each look-up
        return dataset.piece(index, *span) if span else dataset[index]

    samples = [read(0), read(1, 0, 20), read(1, 20, 40)]
    model.train()
    packed = task.loss(model, task.collate(samples)).item()
    alone = [task.loss(model, task.collate([sample])).item() for sample in samples]
    assert packed == pytest.approx(sum(alone), rel=1e-5)
    without = [{key: sample[key] for key in ("input_ids", "labels_mask")} for sample in samples]
    assert task.loss(model, task.collate(without)).item() != pytest.approx(packed, rel=1e-5)
    entire, first, rest = (
        noise_inputs(sample["seed"], len(sample["input_ids"]))[0]
        for sample in (read(1), samples[1], samples[2])
    )
    assert [*first, *rest] == entire[:40].tolist()


def test_noise_is_not_supported_with_streaming(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n' * 8)
    with pytest.raises(ValueError, match=r"neftune_noise_alpha: 5.*not supported with streaming"):
        make_task(dataset=str(path), streaming=True, train_args={"neftune_noise_alpha": 5})
