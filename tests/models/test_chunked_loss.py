"""The loss in chunks equals the loss of all logits, in value and gradients, and never has them all
in memory."""

import weakref
from typing import Any

import pytest
import torch
from families import FAMILIES, NOISE, TOKENS
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from paceline.config.schema.train_args import TrainArgs
from paceline.distributed import torch_compat
from paceline.models.head.chunked_loss import ChunkedLoss, chunked_loss
from paceline.models.head.softmax import IGNORED, LogitTransform
from paceline.models.head.transform import find_transform, output_head
from paceline.models.shape.loss_chunks import choose_loss_chunks

VOCABULARY, CHUNK = 211, 5


@pytest.fixture(params=["cpu", "accelerator"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select the operations of a device type for tensors on the CPU."""
    if request.param == "accelerator":
        module = "paceline.models.head.chunked_loss"
        monkeypatch.setattr(f"{module}.is_computed_as_on_cpu", lambda device_type: False)
    name: str = request.param
    return name


UNCHANGED = LogitTransform()
on_every_device = pytest.mark.usefixtures("kernels")

CPU = torch.device("cpu")
#: Families that change their logits after the head.
CHANGED = {
    "gemma2": LogitTransform(cap=30.0),
    "recurrent_gemma": LogitTransform(cap=30.0),
    "cohere": LogitTransform(scale=0.0625),
    "cohere2": LogitTransform(scale=0.0625),
    "granite_scaled": LogitTransform(scale=0.125),
}
WITH_SCALE = {"granite_scaled": ("granite", {**FAMILIES["granite"][1], "logits_scaling": 8.0})}


def make_model(name: str, **changes: Any) -> Any:
    """Return a tiny model with logits large enough that a soft cap matters."""
    kind, numbers = (FAMILIES | WITH_SCALE)[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, **{**TOKENS, **numbers, "vocab_size": VOCABULARY, **changes}
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * NOISE)
        output_head(model).weight.mul_(20)
    return model.eval()


def make_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token ids [2, 12], positions with loss in any row, and their targets [2, positions]
    of which one has no loss."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2, 12), generator=generator)
    keep = torch.tensor([0, 1, 3, 4, 7, 8, 9])
    targets = ids[:, keep + 1].clone()
    targets[1, 2] = IGNORED
    return ids, keep, targets


def gradients_of(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


#: Weights of the targets of :func:`make_batch`, in a row.
WEIGHTS = torch.arange(14) / 4


def full_loss(model: Any, smoothing: float = 0.0, weighted: bool = False) -> torch.Tensor:
    ids, keep, targets = make_batch()
    logits = model(input_ids=ids, use_cache=False).logits[:, keep]
    losses = functional.cross_entropy(
        logits.flatten(0, 1).float(),
        targets.flatten(),
        reduction="none",
        label_smoothing=smoothing,
    )
    return (losses * WEIGHTS).sum() if weighted else losses.sum()


def loss_in_chunks(
    model: Any, transform: Any, smoothing: float = 0.0, weighted: bool = False
) -> torch.Tensor:
    assert isinstance(transform, LogitTransform), transform
    ids, keep, targets = make_batch()
    weights = WEIGHTS if weighted else None
    loss = ChunkedLoss(
        output_head(model), transform, targets, keep, CHUNK, smoothing, token_weights=weights
    )
    with chunked_loss(loss):
        return loss.result(model(input_ids=ids, use_cache=False).logits)


def assert_equal(
    model: Any,
    rel: float = 1e-6,
    gradient_rel: float = 1e-5,
    smoothing: float = 0.0,
    weighted: bool = False,
) -> None:
    transform = find_transform(model, CPU)
    expected = full_loss(model, smoothing, weighted)
    actual = loss_in_chunks(model, transform, smoothing, weighted)
    assert actual.item() == pytest.approx(expected.item(), rel=rel)
    left, right = gradients_of(model, actual), gradients_of(model, expected)
    assert set(left) == set(right) != set()
    scale = max(float(gradient.abs().max()) for gradient in right.values())
    for name, gradient in left.items():
        assert gradient.dtype == right[name].dtype
        difference = float((gradient - right[name]).abs().max())
        assert difference <= gradient_rel * float(right[name].abs().max()) + 1e-7 * scale, name
    with torch.no_grad():
        again = loss_in_chunks(model, transform, smoothing, weighted)
    assert float(again) == pytest.approx(expected.item(), rel=rel)


FAST = ["qwen2", "gpt2", "phi", "gemma2", "granite_scaled", "cohere", "mamba", "opt_350m"]


@on_every_device
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FAST else [pytest.mark.soak])
        for name in [*FAMILIES, *WITH_SCALE]
    ],
)
def test_family_has_equal_loss_and_gradients(name: str) -> None:
    # The forward of RWKV changes its weights in evaluation mode.
    model = make_model(name).train(name == "rwkv")
    assert find_transform(model, CPU) == CHANGED.get(name, LogitTransform())
    assert_equal(model)


@on_every_device
@pytest.mark.parametrize(
    "adapter",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"]},
    ],
    ids=["adapted", "saved", "frozen"],
)
def test_adapters_on_the_head(adapter: dict[str, Any]) -> None:
    model: Any = get_peft_model(make_model("llama"), LoraConfig(**adapter))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    assert_equal(model)


@on_every_device
@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_label_smoothing(name: str) -> None:
    assert_equal(make_model(name), smoothing=0.2)


@on_every_device
@pytest.mark.parametrize("name", ["phi", "gemma2"])
def test_weights_of_tokens(name: str) -> None:
    assert_equal(make_model(name), smoothing=0.1, weighted=True)


@on_every_device
def test_tied_embeddings() -> None:
    assert_equal(make_model("qwen2", tie_word_embeddings=True))


@on_every_device
def test_autocast() -> None:
    model = make_model("phi")  # its head has a bias
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(model, rel=1e-3, gradient_rel=3e-2)


@on_every_device
@pytest.mark.parametrize("name", ["phi", "gemma2"])
def test_float16_gradients_are_scaled_before_they_are_rounded(name: str) -> None:
    """Most gradients of the logits are below the smallest float16 number here, unless they are
    multiplied by the loss scale."""
    model, factor = make_model(name), 1e-7
    reference = gradients_of(model, full_loss(model) * factor)
    with torch.autocast("cpu", torch.float16):
        loss = loss_in_chunks(model, find_transform(model, CPU))
    scaled = gradients_of(model, loss * factor * 2.0**16)
    head = next(key for key in reference if key.startswith(("lm_head", "model.embed")))
    for key in (head, next(key for key in reference if "norm" in key)):
        error = (scaled[key] / 2.0**16 - reference[key]).norm() / reference[key].norm()
        assert float(error) < 0.05, key


def test_gradients_of_a_chunked_loss_are_used_once() -> None:
    model = make_model("llama")
    loss = loss_in_chunks(model, LogitTransform())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        loss.backward()


def test_loss_refers_to_its_graph_only_until_it_is_returned() -> None:
    hidden = torch.randn(1, 6, 8, requires_grad=True)
    head = nn.Linear(8, 32)
    chunks = ChunkedLoss(head, LogitTransform(), torch.arange(6), None, chunk_tokens=2)
    with chunked_loss(chunks):
        loss = chunks.result(head(hidden))
    assert loss.requires_grad
    assert chunks.total is None  # else both would exist until Python collects cycles


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest result of an operation with the vocabulary as a dimension,
    other than the weights' gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_output = isinstance(result, torch.Tensor) and result.shape[-1:] == (VOCABULARY,)
        if is_output and result.is_contiguous():  # not a transposed weight
            self.rows = max(self.rows, result.numel() // VOCABULARY)
        return result


@on_every_device
@pytest.mark.parametrize("name", ["opt", "gemma2"])
def test_no_tensor_has_the_logits_of_all_tokens(name: str) -> None:
    model = make_model(name, hidden_size=32, word_embed_proj_dim=4)
    for parameter in output_head(model).parameters():  # its gradient has the vocabulary, too
        parameter.requires_grad_(False)
    transform = find_transform(model, CPU)
    with LargestTensor() as full:
        full_loss(model).backward()
    with LargestTensor() as chunked:
        loss_in_chunks(model, transform).backward()
    assert full.rows >= 14
    assert chunked.rows == CHUNK


class PeakBytes(TorchDispatchMode):
    """Records the largest number of bytes that the results of operations take at a time."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.sizes = {torch_compat.storage_id(tensor): 0 for tensor in known}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            is_tensor = isinstance(tensor, torch.Tensor)
            if is_tensor and (key := torch_compat.storage_id(tensor)) not in self.sizes:
                storage = tensor.untyped_storage()
                self.sizes[key] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, key, 0)
        self.peak = max(self.peak, sum(self.sizes.values()))
        return result


def head_bytes(
    tokens: int,
    chunk_tokens: int | None,
    dtype: torch.dtype,
    trained: bool,
    transform: LogitTransform = UNCHANGED,
) -> int:
    """Return the peak of forward and backward of a float32 head with 152,000 × 512 weights, on top
    of the weights and their gradient. The tensors are fake: they have no values."""
    with FakeTensorMode():
        head = nn.Linear(512, 152_000, bias=False).requires_grad_(trained)
        head.weight.grad = torch.zeros_like(head.weight) if trained else None
        hidden = torch.randn(1, tokens, 512, dtype=dtype).requires_grad_()
        targets = torch.randint(0, 152_000, (1, tokens))
        known = (head.weight, hidden, targets, *([head.weight.grad] if trained else []))
        is_low = dtype != torch.float32
        with PeakBytes(*known) as peak:
            with torch.autocast("cpu", torch.bfloat16, enabled=is_low):
                if chunk_tokens is None:
                    logits = head(hidden).flatten(0, 1).float()
                    loss = functional.cross_entropy(logits, targets.flatten(), reduction="sum")
                else:
                    chunks = ChunkedLoss(head, transform, targets, None, chunk_tokens)
                    with chunked_loss(chunks):
                        loss = chunks.result(head(hidden))
            loss.backward()
        return peak.peak


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_memory_of_a_large_vocabulary(dtype: torch.dtype, trained: bool) -> None:
    """At most an eighth of all logits at 4,096 tokens. One chunk, which is computed from all its
    logits, takes about as much as the first micro-batch that is larger."""
    chunk_tokens = choose_loss_chunks(TrainArgs(), 152_000, "cpu").tokens
    assert chunk_tokens == 384
    full = head_bytes(4096, None, dtype, trained)
    assert head_bytes(4096, chunk_tokens, dtype, trained) <= full / 8
    one_chunk = head_bytes(chunk_tokens, None, dtype, trained)
    assert head_bytes(chunk_tokens + 1, chunk_tokens, dtype, trained) <= 1.05 * one_chunk


@pytest.mark.parametrize("kernels", ["accelerator"], indirect=True)
@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(cap=30.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_accelerators_need_2_gib_for_any_micro_batch(
    kernels: str, dtype: torch.dtype, transform: LogitTransform
) -> None:
    """The size of a chunk that a user sets does not turn chunks off below it."""
    chunks = choose_loss_chunks(TrainArgs(), 152_000, "cuda")
    assert chunks == (832, 384)
    large = choose_loss_chunks(TrainArgs(loss_chunk_size=8192), 152_000, "cuda")
    assert large == (8192, 384)
    for tokens in (385, 833, 16384):
        gradients = 4 * tokens * 512
        assert chunks.divides(tokens)
        peak = head_bytes(tokens, chunks.tokens, dtype, trained=False, transform=transform)
        assert peak - gradients <= 2 << 30
    assert head_bytes(chunks.at_once, None, dtype, trained=False) <= 2 << 30


@on_every_device
@pytest.mark.parametrize("counts_correct", [False, True])
def test_evaluation_counts_correct_predictions(counts_correct: bool) -> None:
    model = make_model("qwen2")
    ids, keep, targets = make_batch()
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[:, keep]
        targets[0] = logits[0].argmax(-1)  # half of them
        chunks = ChunkedLoss(
            output_head(model), LogitTransform(), targets, keep, CHUNK, 0.0, counts_correct
        )
        with chunked_loss(chunks):
            loss = chunks.result(model(input_ids=ids, use_cache=False).logits)
    expected = (logits.argmax(-1) == targets).sum() if counts_correct else 0
    assert int(chunks.num_correct) == int(expected)
    full = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert float(loss) == pytest.approx(float(full), rel=1e-6)


class TwiceCalled(nn.Module):
    """A model whose logits are not an elementwise function of its head's output."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.inner, self.change = make_model("llama"), change
        self.config = self.inner.config

    def get_output_embeddings(self) -> nn.Module:
        return self.inner.lm_head  # type: ignore[no-any-return]

    def forward(self, **inputs: Any) -> Any:
        output = self.inner(**inputs)
        if self.change == "twice":
            output.logits = output.logits + self.inner(**inputs).logits
        elif self.change == "cut":
            output.logits = output.logits[..., :-3]
        else:
            output.logits = output.logits + torch.arange(VOCABULARY)
        return output


@pytest.mark.parametrize(
    ("change", "reason"),
    [("twice", "2 times"), ("cut", "shape|another way"), ("bias", "another way")],
)
def test_other_models_keep_all_logits(change: str, reason: str) -> None:
    result = find_transform(TwiceCalled(change), CPU)
    assert isinstance(result, str)
    assert any(part in result for part in reason.split("|"))


def test_many_improbable_tokens_do_not_look_like_another_loss() -> None:
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(1.0)
        model.lm_head.weight.fill_(0.2)
        model.lm_head.weight[20] += 1.0
    assert find_transform(model, CPU) == LogitTransform()
