"""The wrappers around torch's private names, and that no other module uses private names of
another package."""

import ast
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

import paceline
from paceline.core.errors import ConfigError
from paceline.distributed import torch_compat

SOURCE = Path(paceline.__file__).parent
#: Modules that may use private names, each of one library.
EXCEPTIONS = {
    "cli.py",  # runs the exit functions, then leaves without the interpreter's clean-up
    "launch/fork_server.py",  # hides the main module from its children
    "distributed/torch_compat.py",
    "parallel/pipeline/schedule.py",  # implements the stage of torch's pipeline schedules
    "parallel/deepspeed/package.py",
    "models/attention.py",
    "simulation/torch_internals.py",  # fake tensors and dispatched operations
    "simulation/cuda.py",  # replaces functions of torch.cuda that the CPU build lacks
}
#: Documented names with a leading underscore.
DOCUMENTED = {"_exit", "_current_frames", "_fields", "_asdict", "_replace", "_temp_dir"}


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED


def parse_modules():
    for file in sorted(SOURCE.rglob("*.py")):
        yield file.relative_to(SOURCE).as_posix(), ast.parse(file.read_text(encoding="utf-8"))


def find_defined_names(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == f"self.{node.attr}":
            yield node.attr


def find_private_uses(tree, defined):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            if parts[0] not in ("paceline", "__future__"):
                yield from ((node.lineno, part) for part in parts if is_private(part))
        elif isinstance(node, ast.Import):
            parts = [part for alias in node.names for part in alias.name.split(".")]
            yield from ((node.lineno, part) for part in parts if is_private(part))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            if node.attr not in defined:
                yield node.lineno, node.attr
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
    defined = {name for tree in trees.values() for name in find_defined_names(tree)}
    uses = [
        f"{module}:{line} {name}"
        for module, tree in trees.items()
        if module not in EXCEPTIONS
        for line, name in find_private_uses(tree, defined)
    ]
    assert not uses, "\n".join(uses)


def test_missing_name_error_has_the_supported_range():
    with pytest.raises(ConfigError, match=r"torch\._missing") as caught:
        torch_compat._find(torch, "_missing.name")
    assert torch_compat.SUPPORTED in str(caught.value)
    assert torch_compat._find(torch, "_missing.name", None) is None
    with pytest.raises(ConfigError, match=r"torch\._missing\.module"):
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
    torch_compat.set_allocator_settings("expandable_segments:True")
    with pytest.raises(RuntimeError):
        torch_compat.set_allocator_settings("no such setting")


def test_flight_recorder():
    assert torch_compat.flight_recorder_variable().endswith("BUFFER_SIZE")
    assert isinstance(torch_compat.dump_flight_recorder(), bytes)


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
