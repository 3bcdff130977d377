"""Test simulated CUDA devices: what torch.cuda returns, shapes under FakeTensorMode, and the errors
on machines that cannot simulate. Each test that simulates uses a process of its own, because a
simulation lasts until the process ends."""

import pytest
import torch
from raised import raises_error
from ranks import run_ranks
from torch import nn

from paceline.core.errors import ConfigError
from paceline.distributed.devices import accelerators
from paceline.planner.devices import devices, find_device, recognize
from paceline.simulation import cuda, native

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_shim")]
H100, T4 = find_device("H100-SXM")[0], find_device("T4")[0]


def in_new_process(function, *args):
    """Call a function in a new process, and return its result."""
    return run_ranks(call, 1, function, *args, init_process_group=False)[0]


def call(_env, function, *args):
    return function(*args)


def describe_devices():
    cuda.simulate_cuda(H100, 4)
    torch.cuda.set_per_process_memory_fraction(0.5, 1)
    torch.cuda.set_device(2)
    stream = torch.cuda.Stream(priority=-1)
    with torch.cuda.stream(stream):
        is_current = torch.cuda.current_stream() == stream
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    end.record()
    return {
        "accelerators": accelerators(),
        "count": (torch.cuda.device_count(), torch.accelerator.device_count()),
        "capability": torch.cuda.get_device_capability(),
        "current": (torch.cuda.current_device(), torch.accelerator.current_device_index()),
        "allocated": (torch.cuda.memory_allocated(1), torch.cuda.max_memory_allocated(1)),
        "memory": torch.cuda.mem_get_info(1),
        "fraction": torch.cuda.get_per_process_memory_fraction(1),
        "streams": (is_current, torch.cuda.current_stream() == torch.cuda.default_stream()),
        "events": (end.query(), start.elapsed_time(end) >= 0),
        "generator": torch.cuda.get_rng_state().dtype,
    }


def test_torch_answers_as_the_device():
    answers = in_new_process(describe_devices)
    assert answers == {
        "accelerators": ("cuda", ["NVIDIA H100-SXM"] * 4),
        "count": (4, 4),
        "capability": (9, 0),
        "current": (2, 2),
        "allocated": (0, 0),
        "memory": (80 * 10**9, 80 * 10**9),
        "fraction": 0.5,
        "streams": (True, True),
        "events": (True, True),
        "generator": torch.uint8,
    }
    assert recognize("NVIDIA H100-SXM", answers["memory"][1]) == H100


def change_devices():
    cuda.simulate_cuda(H100, 4)
    cuda.simulate_cuda(T4, 1)
    properties = torch.cuda.get_device_properties(0)
    supports_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cuda.device_count(), properties.major, properties.minor, supports_bf16


def test_a_further_call_changes_the_devices():
    assert in_new_process(change_devices) == (1, 7, 5, False)


def compute_shapes():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    cuda.simulate_cuda(H100, 2)
    with FakeTensorMode():
        model = nn.Linear(64, 32).to("cuda:1")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            output = model(torch.randn(8, 64, device="cuda:1"))
        output.float().sum().backward()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        optimizer.step()
        query = torch.randn(1, 2, 16, 8, dtype=torch.bfloat16, device="cuda")
        with FlopCounterMode(display=False) as counter:
            nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        with pytest.raises(RuntimeError, match=r"cpu.*cuda:1|cuda:1.*cpu"):
            model(torch.randn(8, 64))
    kernels = {str(kernel) for counts in counter.flop_counts.values() for kernel in counts}
    return output.dtype, str(model.weight.grad.device), kernels


def test_shapes_of_a_training_step():
    dtype, device, kernels = in_new_process(compute_shapes)
    assert (dtype, device) == (torch.bfloat16, "cuda:1")
    assert any("flash_attention" in kernel for kernel in kernels)


def test_error_if_the_device_is_not_cuda():
    with raises_error(ConfigError, code="device-not-simulated"):
        cuda.simulate_cuda(find_device("MI300X")[0], 8)
    with raises_error(ConfigError, code="simulated-device-count"):
        cuda.simulate_cuda(H100, 0)


def test_devices_without_compute_capability_are_those_of_amd():
    others = {row.name for row in devices() if row.compute_capability is None}
    assert others == {row.name for row in devices() if row.source.startswith("AMD")}


@pytest.mark.parametrize(
    ("version", "cuda_version", "message"),
    [
        (
            "2.13.0+cu130",
            "13.0",
            "torch 2.13.0.cu130 is a GPU build.*To fix: install",
        ),
        ("2.14.0+cpu", None, "cannot be simulated with torch 2.14.0.cpu. Allowed: torch>=2.13"),
    ],
)
def test_error_with_another_build_of_torch(version, cuda_version, message, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", cuda_version)
    with pytest.raises(native.SimulationError, match=message):
        cuda.simulate_cuda(H100, 1)


def test_error_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(native.SimulationError, match=r"needs a C\+\+ compiler.*install one"):
        cuda.simulate_cuda(H100, 1)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(native.SimulationError, match="`no-such-compiler` cannot be started"):
        cuda.simulate_cuda(H100, 1)


def test_error_without_the_headers_of_torch(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    with pytest.raises(native.SimulationError, match=r"needs the C\+\+ headers of torch"):
        cuda.simulate_cuda(H100, 1)


def test_error_of_the_compiler_is_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "broken.cpp"
    source.write_text("#error not this release\n")
    with pytest.raises(native.SimulationError, match=r"cannot compile broken\.cpp.*not this relea"):
        native.build_library(source)


def test_a_library_is_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "empty.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n')
    library = native.build_library(source)
    assert cuda.load_library(source).answer() == 42
    compiled = library.stat().st_mtime_ns
    assert native.build_library(source) == library
    assert library.stat().st_mtime_ns == compiled
    source.write_text('extern "C" int answer() { return 43; }\n')
    assert native.build_library(source) != library


def test_a_damaged_library_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "empty.cpp"
    source.write_text("\n")
    native.build_library(source).write_bytes(b"damaged")
    with pytest.raises(native.SimulationError, match=r"cannot be loaded.*To fix: delete"):
        cuda.load_library(source)
