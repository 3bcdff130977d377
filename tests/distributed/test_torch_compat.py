"""The wrappers around torch's private names, and that no other module uses private names of
another package."""

import ast
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from raised import raises_error
from ranks import run_ranks
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import paceline
from paceline.core.errors import ConfigError
from paceline.distributed import torch_compat
from paceline.simulation import torch_internals

SOURCE = Path(paceline.__file__).parent
#: Modules that may use private names, each of one library.
EXCEPTIONS = {
    "cli.py",  # runs the exit functions, then leaves without the interpreter's clean-up
    "core/fork_server/server.py",  # lets children use the server from which they were forked
    "launch/fork_server.py",  # stops the server of an earlier run
    "distributed/torch_compat.py",
    "strategies/pipeline/schedule.py",  # implements the stage of torch's pipeline schedules
    "strategies/deepspeed/package.py",
    "models/attention.py",
    "models/kernels/fused_attention.py",
    "models/transformers_compat.py",
    "simulation/torch_internals.py",  # fake tensors and dispatched operations
    "simulation/cuda.py",  # replaces functions of torch.cuda that the CPU build lacks
    "train/optimizers/torchao_adamw.py",  # creates buffers as its base class does
}
#: The name of a private module in quotes, for ``import_module`` and the like.
PRIVATE_MODULE = re.compile(
    r"(torch|transformers|peft|datasets|deepspeed|ray)(\.\w+)*\._\w+(\.\w+)*"
)
#: Documented names with a leading underscore.
DOCUMENTED = {"_exit", "_current_frames", "_fields", "_asdict", "_replace", "_temp_dir"}


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED


def parse_modules():
    for file in sorted(SOURCE.rglob("*.py")):
        yield file.relative_to(SOURCE).as_posix(), ast.parse(file.read_text(encoding="utf-8"))


def is_attribute_of_self(node):
    return isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self"


def find_defined_names(tree):
    """Return the names that a module defines, and the attributes that it sets."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif is_attribute_of_self(node) and isinstance(node.ctx, ast.Store):
            yield node.attr


def find_private_uses(tree, inherited):
    """Return the lines and names of private names that are not this package's own.

    Args:
        inherited: names that any module defines, which ``self`` may have from a base class.
    """
    defined = {*find_defined_names(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            if parts[0] not in ("paceline", "__future__"):
                yield from ((node.lineno, part) for part in parts if is_private(part))
        elif isinstance(node, ast.Import):
            parts = [part for alias in node.names for part in alias.name.split(".")]
            yield from ((node.lineno, part) for part in parts if is_private(part))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            is_own = is_attribute_of_self(node) and node.attr in inherited
            if not is_own and node.attr not in defined:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and PRIVATE_MODULE.fullmatch(str(node.value)):
            yield node.lineno, node.value
        elif isinstance(node, ast.keyword) and node.arg is not None and is_private(node.arg):
            if node.arg not in defined:
                yield node.value.lineno, node.arg
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", "") in ("getattr", "setattr", "hasattr", "delattr")
            and isinstance(node.args[1], ast.Constant)
            and is_private(node.args[1].value)
            and node.args[1].value not in defined
        ):
            yield node.lineno, node.args[1].value


def test_private_names_are_used_only_in_listed_modules():
    trees = dict(parse_modules())
    inherited = {name for tree in trees.values() for name in find_defined_names(tree)}
    uses = [
        f"{module}:{line} {name}"
        for module, tree in trees.items()
        if module not in EXCEPTIONS
        for line, name in find_private_uses(tree, inherited)
    ]
    assert not uses, "\n".join(uses)


PRIVATE_USES = """
import torch._dynamo
from torch.distributed._tools import fake_collectives
tensor._version
self._new_buffer(tensor)
getattr(model, "_attn_implementation", None)
preload = ["torch._dynamo", "torch.fx"]
call(_transports=["uv"])
"""


def test_private_uses_are_detected():
    uses = find_private_uses(ast.parse(PRIVATE_USES), inherited={"_version"})
    assert sorted(line for line, _ in uses) == [2, 3, 4, 5, 6, 7, 8]


def test_own_names_are_not_private_uses():
    text = "def _read(): self._file = 1\n_read()\nother._file\nself._inherited\nprocess._exit(1)"
    assert list(find_private_uses(ast.parse(text), inherited={"_inherited"})) == []


@pytest.mark.parametrize("module", ["distributed/torch_compat.py", "simulation/torch_internals.py"])
def test_every_wrapper_is_called_here(module):
    """So that a new release of torch is tried by running this file."""
    wrappers = {
        node.name
        for node in ast.parse((SOURCE / module).read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    called = {
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert wrappers - called == set()


def test_refused_operations_run_on_the_meta_device():
    on_meta = torch.zeros(2, 3, device="meta")
    autocast = torch.autocast
    with torch_compat.runs_on_meta():
        assert on_meta.nonzero().shape == (6, 2)
        with torch.autocast("meta", enabled=False), torch.autocast("cpu", torch.bfloat16):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert torch.autocast is autocast
    with pytest.raises(NotImplementedError):
        on_meta.nonzero()


def test_missing_name_error_has_the_supported_range():
    with raises_error(ConfigError, code="missing-in-torch") as caught:
        torch_compat._find(torch, "_missing.name")
    assert torch_compat.SUPPORTED in str(caught.value)
    assert torch_compat._find(torch, "_missing.name", None) is None
    with raises_error(ConfigError, code="missing-in-torch"):
        torch_compat._import("torch._missing.module")


def test_supported_range_matches_pyproject():
    project = SOURCE.parents[1] / "pyproject.toml"
    if not project.exists():
        pytest.skip("installed without its sources")
    assert f'"{torch_compat.SUPPORTED}"' in project.read_text(encoding="utf-8")


FOREACH = ["_foreach_zero_", "_foreach_copy_", "_foreach_add_", "_foreach_mul_", "_foreach_norm"]


@pytest.mark.parametrize("has_kernels", [True, False])
def test_foreach_functions(has_kernels, monkeypatch):
    if not has_kernels:
        for name in FOREACH:
            monkeypatch.delattr(torch, name)
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([[1.0]])]
    norms = torch_compat.foreach_norm(tensors, torch.float64)
    assert [float(norm) for norm in norms] == [5.0, 1.0]
    assert {norm.dtype for norm in norms} == {torch.float64}
    others = [torch.ones(2), torch.ones(1, 1)]
    torch_compat.foreach_add_(tensors, others, alpha=-2.0)
    assert [tensor.tolist() for tensor in tensors] == [[1.0, 2.0], [[-1.0]]]
    torch_compat.foreach_mul_(tensors, 3.0)
    torch_compat.foreach_mul_(tensors, torch.tensor(0.5))
    assert [tensor.tolist() for tensor in tensors] == [[1.5, 3.0], [[-1.5]]]
    torch_compat.foreach_copy_(tensors, others)
    assert torch.equal(tensors[0], others[0])
    torch_compat.foreach_zero_(tensors)
    assert not any(tensor.any() for tensor in tensors)


def test_tensor_version_and_storage_id():
    tensor = torch.zeros(2)
    version = torch_compat.tensor_version(tensor)
    tensor.add_(1)
    assert torch_compat.tensor_version(tensor) > version
    on_meta = torch.zeros(4, device="meta")
    assert torch_compat.storage_id(on_meta) == torch_compat.storage_id(on_meta[1:])
    assert torch_compat.storage_id(on_meta) != torch_compat.storage_id(torch.zeros(4))


def test_meta_and_fake_tensors_have_no_values():
    fake_tensor = torch_compat._import("torch._subclasses.fake_tensor")
    with fake_tensor.FakeTensorMode():
        assert not torch_compat.has_values(torch.zeros(1))
        with torch_compat.without_fake_tensors():
            assert torch_compat.has_values(torch.zeros(1))
    assert not torch_compat.has_values(torch.zeros(1, device="meta"))
    assert torch_compat.has_values(torch.zeros(1))


def test_classification_of_dispatched_operations():
    class Recorder(torch_compat.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((torch_compat.is_mutable_op(func), torch_compat.is_item_op(func)))
            return func(*args, **(kwargs or {}))

    seen = []
    tensor = torch.ones(1)
    with Recorder():
        tensor + 1
        tensor.add_(1)
        tensor.item()
    assert seen == [(False, False), (True, False), (False, True)]


def test_fused_optimizers_take_found_inf():
    parameter = nn.Parameter(torch.zeros(1))
    assert torch_compat.takes_found_inf(torch.optim.AdamW([parameter], fused=True))
    assert not torch_compat.takes_found_inf(torch.optim.AdamW([parameter], foreach=False))


def test_allocator_settings_are_parsed():
    torch_compat.set_allocator_settings(
        "expandable_segments:True", "pinned_max_round_threshold_mb:16"
    )
    torch_compat.set_allocator_settings("expandable_segments:True", "no such setting")
    with pytest.raises((RuntimeError, ValueError)):  # which one depends on the release
        torch_compat.set_allocator_settings("no such setting")


def test_flight_recorder():
    assert torch_compat.flight_recorder_variable().endswith("BUFFER_SIZE")
    assert isinstance(torch_compat.dump_flight_recorder(), bytes)


def test_rpc_over_tcp_only():
    options = torch_compat.tcp_rpc_options(num_threads=2, timeout_s=3.0)
    assert (options.num_worker_threads, options.rpc_timeout) == (2, 3.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_history_is_written(tmp_path):
    assert torch_compat.can_record_memory_history()
    torch_compat.record_memory_history()
    torch.ones(4, device="cuda")
    torch_compat.dump_memory_history(str(tmp_path / "memory.pickle"))
    assert (tmp_path / "memory.pickle").stat().st_size > 0


def test_compilations_are_reported():
    calls = []
    torch_compat.on_compilations(lambda _: calls.append("start"), lambda _: calls.append("end"))
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert calls == ["start", "end"]


class OperationLog(torch_compat.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations.append((func, args))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def fake_group():
    dist.init_process_group("fake", rank=0, world_size=4, store=torch_internals.FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_arguments_that_an_operation_changes():
    add = torch.ops.aten.add_.Tensor
    assert torch_internals.changes_arguments(add) == [True, False, False]
    assert torch_internals.changes_arguments(torch.ops.aten.mm.default) == [False, False]


def test_operations_of_a_simulated_rank_are_recognized(fake_group):
    with torch_internals.FakeTensorMode(), OperationLog() as log:
        torch.mm(torch.ones(2, 3), torch.ones(3, 5))
        dist.all_reduce(torch.ones(4))
        funcol.wait_tensor(funcol.all_reduce(torch.ones(4), "sum", fake_group))
    collectives = [
        (torch_internals.operation_name(op), torch_internals.collective_size(op, args))
        for op, args in log.operations
        if torch_internals.is_collective(op) and torch_internals.sends_message(op)
    ]
    assert collectives == [("allreduce_", 4), ("all_reduce", 4)]
    assert any(torch_internals.is_wait(op) for op, _ in log.operations)
    product = next(op for op, _ in log.operations if torch_internals.operation_name(op) == "mm")
    formula = torch_internals.flop_formula(product)
    assert formula(torch.ones(2, 3), torch.ones(3, 5), out_val=torch.ones(2, 5)) == 60
    assert torch_internals.flop_formula(torch.ops.aten.add.Tensor) is None


def test_grouped_products_without_values_are_allowed_and_restored():
    def product() -> torch.Tensor:
        left, right = torch.empty(8, 16, device="meta"), torch.empty(2, 16, 32, device="meta")
        ends = torch.empty(2, dtype=torch.int32, device="meta")
        return torch.ops.aten._grouped_mm(left, right, ends)

    registrations = torch_internals._meta_registrations
    plain = registrations._meta_grouped_mm_common
    restore = torch_internals.allow_grouped_mm_of_all_dtypes()
    try:
        assert (product().shape, product().dtype) == ((8, 32), torch.float32)
    finally:
        restore()
    assert registrations._meta_grouped_mm_common is plain


def test_shape_propagation_is_wrapped_and_restored():
    propagator = torch_internals.ShardingPropagator
    plain = propagator._propagate_tensor_meta_non_cached
    restore = torch_internals.wrap_shape_propagation(lambda function: lambda *args: function(*args))
    assert propagator._propagate_tensor_meta_non_cached is not plain
    restore()
    assert propagator._propagate_tensor_meta_non_cached is plain


class Choice(nn.Module):
    """Uses one of two layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.last = nn.Linear(4, 1)

    def forward(self, x, number):
        return self.last(self.layers[number](x)).sum()


def use_different_layers(world, accumulation):
    """Return the gradients after micro-batches in which the two ranks use different layers."""
    mesh = DeviceMesh("cpu", range(world.size), mesh_dim_names=("shard",))
    model = Choice()
    for unit in (model.last, model):
        fully_shard(unit, mesh=mesh)
    torch_compat.reduce_unused_parameters(model)
    for number in range(accumulation):
        x = torch.full((2, 4), 1.0 + world.rank + number)
        model(x, (world.rank + number) % 2).backward()
    return {name: each.grad.full_tensor() for name, each in model.named_parameters()}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_ranks_may_use_different_parameters(accumulation):
    first, second = run_ranks(use_different_layers, 2, accumulation)
    model = Choice()
    for rank in range(2):
        for number in range(accumulation):
            x = torch.full((2, 4), 1.0 + rank + number)
            (model(x, (rank + number) % 2) / 2).backward()
    for name, each in model.named_parameters():
        torch.testing.assert_close(first[name], each.grad)
        torch.testing.assert_close(second[name], each.grad)


def hook_and_use_store(world):
    store = torch_compat.default_store()
    store.set(f"rank {world.rank}", "ready")
    store.wait(["rank 0", "rank 1"])
    before = dist.all_reduce
    torch_compat.hook_collectives(["all_reduce"], lambda *_: None, lambda *_: None)
    is_hooked_once = dist.all_reduce is before
    counted = world.traffic.total
    dist.all_reduce(torch.ones(4))
    return is_hooked_once, world.traffic.total - counted, hasattr(before, "__wrapped__")


def test_collectives_are_hooked_once_and_counted():
    assert run_ranks(hook_and_use_store, 2) == [(True, 16, True)] * 2


def hook_unknown_function(_env):
    torch_compat._is_hooked = False
    torch_compat.hook_collectives(
        ["all_reduce_of_the_future", "all_reduce"], lambda *_: "hooked", lambda wait, _: wait
    )
    return dist.all_reduce, hasattr(dist, "all_reduce_of_the_future")


def test_functions_that_this_torch_lacks_are_not_hooked():
    results = run_ranks(hook_unknown_function, 1, init_process_group=False)
    assert results == [("hooked", False)]


def test_backward_pass_is_recognized():
    weight, seen = torch.ones(2, requires_grad=True), []
    weight.register_hook(lambda _: seen.append(torch_compat.in_backward()))
    weight.sum().backward()
    assert (seen, torch_compat.in_backward()) == ([True], False)


def small_states() -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return queries, keys and values [1, heads, tokens, head_size], the gradient of the output,
    and the scores."""
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 4, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8), (1, 4, 5, 8)
    *states, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    scores = states[0] @ states[1].repeat_interleave(2, 1).mT * 0.3
    return [state.requires_grad_() for state in states], grad, scores


def test_flash_attention_for_cpu() -> None:
    states, grad, scores = small_states()
    expected = nn.functional.scaled_dot_product_attention(*states, scale=0.3, enable_gqa=True)
    grads = torch.autograd.grad(expected, states, grad)
    with torch.no_grad():
        output, lse = torch_compat.flash_for_cpu(*states, 0.3, False, None)
        results = torch_compat.flash_for_cpu_backward(
            grad, (states[0], states[1], states[2]), output, lse, 0.3, False, None
        )
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(results, grads)


def test_products_of_16_bits_are_added_on_cuda_builds() -> None:
    assert torch_compat.has_mixed_addmm() == (torch.version.cuda is not None)


def test_backward_of_varlen() -> None:
    import varlen_reference

    varlen_reference.register()
    states, grad, _ = small_states()
    rows = [each.squeeze(0).transpose(0, 1) for each in states]
    ends = tuple(torch.tensor([0, count], dtype=torch.int32) for count in (5, 7))
    output, lse, _ = varlen_reference.forward(*rows, *ends, 5, 7, False, 0.3, [-1, -1], True)
    expected = torch.autograd.grad(output, rows, grad.squeeze(0).transpose(0, 1))
    results = torch_compat.varlen_backward(
        grad.squeeze(0).transpose(0, 1),
        (rows[0].detach(), rows[1].detach(), rows[2].detach()),
        output.detach(),
        lse.detach().contiguous(),
        (ends[0], ends[1]),
        (5, 7),
        0.3,
        (-1, -1),
    )
    torch.testing.assert_close(results, expected)


def test_backward_of_a_simulated_activation_is_one_operation():
    restore = torch_internals.keep_single_kernels()
    try:
        with torch_internals.FakeTensorMode(), OperationLog() as log:
            x = torch.ones(2, 3, device="cuda")
            torch.ops.aten.silu_backward(x, x)
    finally:
        restore()
    names = [torch_internals.operation_name(op) for op, _ in log.operations]
    assert names[-1] == "silu_backward"


def test_rows_that_are_added_to_zeros_are_recognized():
    with torch_internals.FakeTensorMode(), OperationLog() as log:
        rows, indices = torch.ones(2, 3), [torch.tensor([0, 1])]
        torch.zeros(4, 3).index_put(indices, rows, accumulate=True)
        torch.zeros(4, 3).index_put(indices, rows)
    adds = [torch_internals.adds_to_zeros(op, args) for op, args in log.operations]
    assert adds.count(True) == 1
