"""What the attention of divided rows supports besides plain attention, and what it refuses."""

import threading
from types import SimpleNamespace

import pytest
import torch
from context_reference import Case, difference, share, states_of, whole_row
from families import build_model
from raised import raises_error
from ranks import run_ranks

from paceline.config.schema.train_args import TrainArgs
from paceline.core.errors import ConfigError
from paceline.core.texts import UserText
from paceline.data.collate import segment_inputs
from paceline.data.context.rows import divide_row
from paceline.distributed.communicator import Communicator
from paceline.distributed.environment import RankEnv
from paceline.distributed.traffic import TRAFFIC, log_calls
from paceline.models import attention
from paceline.models.context import attention as context_module
from paceline.models.context import ring
from paceline.models.context.attention import (
    context_attention,
    install_context,
)
from paceline.models.context.blocks import ring_steps
from paceline.models.context.choice import ContextMethod
from paceline.models.context.kernels import CpuBlocks
from paceline.models.context.methods import METHODS
from paceline.models.context.place import ContextPlace
from paceline.models.transforms.activation_checkpointing import checkpoint_activations
from paceline.models.transforms.compile import compile_blocks
from paceline.train.reports.figures import context_report

DOCUMENTS = (5, 21, 1, 34, 13, 8, 27)


def lone_place() -> ContextPlace:
    return ContextPlace(Communicator(RankEnv(0, 1, 0, 1), torch.device("cpu")))


@pytest.mark.parametrize("method", METHODS)
def test_one_rank_computes_the_whole_row(method: str) -> None:
    case = Case(DOCUMENTS, key_heads=2, window=9)
    assert difference(case, whole_row(case), [share(case, lone_place(), method)]) <= 1e-6


def order_of_calls(world):
    """Return what this rank does in order, in forward and backward of one layer."""
    order = []
    send_and_receive, forward, backward = (
        ring.send_and_receive,
        CpuBlocks.forward,
        CpuBlocks.backward,
    )

    def requested(group, sent, target, received, source):
        order.append(("request", (world.rank - source) % world.size))
        return send_and_receive(group, sent, target, received, source)

    def computed(function, name):
        def call(self, states, blocks, *args):
            order.append((name, len(order)))
            return function(self, states, blocks, *args)

        return call

    ring.send_and_receive = requested
    CpuBlocks.forward = computed(forward, "forward")
    CpuBlocks.backward = computed(backward, "backward")
    with log_calls() as calls:
        share(Case((240,)), ContextPlace(world), "ring")
    return [name if name != "request" else number for name, number in order], [
        call.size_bytes for call in calls
    ]


def test_next_keys_are_requested_before_a_step_is_computed() -> None:
    size = 2
    for rank, (order, sent) in enumerate(run_ranks(order_of_calls, size)):
        # The keys of step 1 are requested before step 0; gradients return after their step.
        assert order == [1, "forward", "forward", 1, "backward", "backward", 1]
        steps = ring_steps((240,), size, rank)
        key_bytes = 4 * (8 + 8) * 4
        keys, grads = steps[1].num_sent * key_bytes, steps[1].num_received * key_bytes
        assert sent == [keys, keys, grads]


def dropped(world):
    case = Case(DOCUMENTS)
    place = ContextPlace(world)
    torch.manual_seed(world.rank)
    result = share(case, place, "gather", dropout=0.5)
    for method in ("ring", "ulysses"):
        with pytest.raises(NotImplementedError, match="dropout"):
            share(case, place, method, dropout=0.5)
    return result


@pytest.mark.soak
def test_gather_drops_attention_weights_and_the_others_refuse_to() -> None:
    case = Case(DOCUMENTS)
    results = run_ranks(dropped, 2)
    assert difference(case, whole_row(case), results) > 0.1


@pytest.mark.parametrize(
    "inputs",
    [
        {"softcap": 30.0},
        {"s_aux": torch.zeros(4)},
        {"position_bias": torch.zeros(1)},
        {"segment_lengths": None},
    ],
    ids=lambda inputs: next(iter(inputs)),
)
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_unsupported_features_are_refused(method: str, inputs: dict[str, object]) -> None:
    states = states_of(Case((5,)))[:3]
    arguments = {**segment_inputs((5,)), **inputs}
    with pytest.raises(NotImplementedError):
        context_attention(
            torch.nn.Module(), *states, None, place=lone_place(), method=method, kernel="sdpa",
            **arguments,
        )  # fmt: skip


def test_number_of_tokens_must_be_of_this_rank() -> None:
    states = states_of(Case((5,)))[:3]
    with pytest.raises(ValueError, match="6 tokens"):
        context_attention(
            torch.nn.Module(), *states, None, place=lone_place(), method="ring", kernel="sdpa",
            **segment_inputs((6,)),
        )  # fmt: skip


@pytest.mark.soak
def test_older_attention_cannot_be_replaced() -> None:
    with raises_error(ConfigError, code="context-attention-fixed"):
        install_context(build_model("bloom"), lone_place(), "ring", "sdpa")
    with raises_error(ConfigError, code="context-attention-fixed"):
        install_context(torch.nn.Linear(2, 2), lone_place(), "ring", "sdpa")


@pytest.mark.soak
def test_model_gets_its_attention_back() -> None:
    model = build_model("llama")
    before = attention.attention_of(model)
    install_context(model, lone_place(), "ring", "sdpa")
    install_context(model, lone_place(), "gather", "sdpa")
    assert attention.attention_of(model) == attention.CONTEXT_NAME
    attention.uninstall(model)
    assert attention.attention_of(model) == before


def trained(world, setting):
    """Return the gradients of a model with a divided row. Backward runs in another thread."""
    lengths = (7, 30, 1, 22)
    results = {}
    for method in METHODS:
        model = build_model("qwen3").train()
        if setting == "compiled":
            compile_blocks(model, TrainArgs(torch_compile=True, torch_compile_backend="eager"))
        install_context(model, ContextPlace(world), method, "sdpa")
        if setting == "checkpointed":
            checkpoint_activations(model, "full")
        index = torch.from_numpy(divide_row(lengths, world.size).positions(world.rank))
        positions = torch.cat([torch.arange(length) for length in lengths])[index]
        with torch.autocast("cpu", torch.bfloat16, enabled=setting == "autocast"):
            logits = model(
                input_ids=index.unsqueeze(0) + 10,
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                **segment_inputs(lengths),
            ).logits
        loss = logits.float().square().sum()
        backward = threading.Thread(target=loss.backward)
        backward.start()
        backward.join()
        results[method] = [parameter.grad for parameter in model.parameters()]
    return results


@pytest.mark.soak
@pytest.mark.parametrize(
    ("setting", "tolerance"), [("checkpointed", 1e-6), ("compiled", 1e-5), ("autocast", 6e-2)]
)
def test_gradients_do_not_depend_on_how_blocks_run(setting: str, tolerance: float) -> None:
    plain, changed = run_ranks(trained, 2, "plain"), run_ranks(trained, 2, setting)
    for method in METHODS:
        pairs = zip(*(
            [sum(each) for each in zip(*(rank[method] for rank in ranks), strict=True)]
            for ranks in (plain, changed)
        ), strict=True)  # fmt: skip
        for expected, gradient in pairs:
            assert (gradient - expected).norm() <= tolerance * expected.norm() + 1e-7


def autocast_dtypes(world):
    """Return the data types of the result and of what the ranks exchange, with queries in float32
    under autocast."""
    case = Case(DOCUMENTS)
    dtypes = {}
    for method in METHODS:
        before = TRAFFIC.total
        with torch.autocast("cpu", torch.bfloat16):
            parts = [part.float() for part in shared_in(case, ContextPlace(world), method)]
        low = TRAFFIC.total - before
        before = TRAFFIC.total
        share(case, ContextPlace(world), method)
        dtypes[method] = parts, low, TRAFFIC.total - before
    return dtypes


def shared_in(case, place, method):
    index = torch.from_numpy(divide_row(case.lengths, place.group.size).positions(place.group.rank))
    *states, grad = [state[:, :, index] for state in states_of(case)]
    states = [state.requires_grad_() for state in states]
    output, _ = context_attention(
        torch.nn.Module(), *states, None, place=place, method=method, kernel="sdpa",
        **segment_inputs(case.lengths),
    )  # fmt: skip
    assert output.dtype == torch.bfloat16
    output = output.transpose(1, 2)
    return [output.detach(), *torch.autograd.grad(output, states, grad.to(output.dtype))]


@pytest.mark.soak
def test_autocast_exchanges_half_precision() -> None:
    case = Case(DOCUMENTS)
    results = run_ranks(autocast_dtypes, 2)
    for method in METHODS:
        parts = [result[method][0] for result in results]
        assert difference(case, whole_row(case), parts) <= 3e-2
        for result in results:
            _, low, full = result[method]
            # `gather` sums gradients in float32.
            assert low == (full * 3 // 4 if method == "gather" else full // 2)


def test_layers_without_a_kernel_for_blocks_are_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is taken away, because the CPU's computes blocks of all sizes."""
    monkeypatch.setattr(context_module, "find_block_kernel", lambda query, value: None)
    place, case = lone_place(), Case(DOCUMENTS, key_heads=2)
    for _ in range(2):
        assert difference(case, whole_row(case), [share(case, place, "ring")]) <= 1e-6
    assert [getattr(record.msg, "code", None) for record in caplog.records] == [
        "context-layers-gathered"
    ]
    head_size = case.head_size
    assert place.gathered_head_sizes == {head_size}
    task = SimpleNamespace(
        context_method=ContextMethod("ring", UserText("it was requested", code="c")), place=place
    )
    assert context_report(task, 2) == {
        "size": 2,
        "method": "ring",
        "why": "it was requested",
        "gathered_head_sizes": [head_size],
    }
