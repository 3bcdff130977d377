// CUDA tensors with values, in addition to the simulated device of src/paceline/simulation/shim.cpp,
// which must be loaded first. A CUDA tensor has memory of the host. One fallback runs every operation
// of the CUDA key: it passes each CUDA tensor to the CPU's kernel as a CPU tensor over the same bytes,
// and returns the results as CUDA tensors. It refuses an operation on CUDA tensors and CPU tensors
// with one or more dimensions, as a GPU does.
//
// All memory of CUDA tensors comes from the allocator of the shim, which counts it and has a limit:
// that of results and that which a kernel of the CPU allocates and frees. A kernel of a GPU may
// need more or less of the latter.
//
// This detects tensors on a wrong device, wrong values, and a lack of memory. It does not have a
// GPU's speed, rounding or asynchrony.
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

// Of shim.cpp.
extern "C" void paceline_report_synchronization(const char* name);
extern "C" bool paceline_release(void* data);

namespace {

using at::Tensor;
using c10::Device;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using Stack = torch::jit::Stack;

c10::Allocator* cuda_allocator() { return c10::GetAllocator(c10::kCUDA); }
c10::DeviceIndex current_device() {
  return c10::impl::getDeviceGuardImpl(c10::kCUDA)->getDevice().index();
}

// The device for which this thread runs a kernel of the CPU; -1 in all other cases.
thread_local c10::DeviceIndex kernel_device = -1;

// Counts what the CPU's kernels allocate as memory of a device.
struct CountingGuard {
  c10::DeviceIndex previous;
  explicit CountingGuard(c10::DeviceIndex device)
      : previous(std::exchange(kernel_device, device)) {}
  ~CountingGuard() { kernel_device = previous; }
};

// The allocator of the CPU. In a kernel that runs for a device, memory comes from the allocator of
// CUDA, so it counts until it is freed, as part of the CUDA tensor that it becomes or before.
struct CPUAllocator final : c10::Allocator {
  c10::Allocator* const host = c10::GetCPUAllocator();

  c10::DataPtr allocate(size_t size) override {
    if (kernel_device < 0) return host->allocate(size);
    c10::DeviceGuard guard(Device(c10::kCUDA, kernel_device));
    void* data = cuda_allocator()->allocate(size).release_context();
    return {data, data, cuda_allocator()->raw_deleter(), Device(c10::kCPU)};
  }
  // Of memory that oneDNN allocates for a kernel, with or without a device.
  c10::DeleterFnPtr raw_deleter() const override {
    static const auto release_host = host->raw_deleter();
    return [](void* data) {
      if (!paceline_release(data)) release_host(data);
    };
  }
  void copy_data(void* target, const void* source, size_t size) const override {
    default_copy_data(target, source, size);
  }
};
const bool has_allocator = (c10::SetCPUAllocator(new CPUAllocator, 255), true);

// Returns a tensor over the bytes of `source`, which says that they are on `device`.
Tensor alias(const Tensor& source, Device device, DispatchKey key) {
  const auto& storage = source.storage();
  c10::DataPtr data(const_cast<void*>(storage.data()), new Tensor(source),
                    [](void* owner) { delete static_cast<Tensor*>(owner); }, device);
  auto aliased = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(data),
      c10::GetAllocator(device.type()), /*resizable=*/true);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(aliased),
                                                         DispatchKeySet(key), source.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides(),
                                                      source.storage_offset());
  if (source.is_conj()) tensor._set_conj(true);
  return tensor;
}

// Operations of a GPU that accept CPU tensors with dimensions.
bool accepts_cpu_tensors(const std::string& name) {
  static const std::set<std::string> names{
      "aten::copy_",      "aten::_foreach_copy_",    "aten::index.Tensor",
      "aten::index_put_", "aten::_index_put_impl_", "aten::set_.source_Tensor"};
  return names.count(name) || names.count(name.substr(0, name.find('.')));
}

// -- operations for which the host of a GPU waits for the device
// Operations whose result, or the size of it, the host needs.
bool reads_result(const std::string& name, const std::vector<IValue>& arguments) {
  static const std::set<std::string> names{
      "aten::_local_scalar_dense", "aten::nonzero",      "aten::masked_select",
      "aten::_unique",             "aten::_unique2",     "aten::unique_dim",
      "aten::unique_consecutive",  "aten::equal",        "aten::bincount",
      "aten::histc",               "aten::_linalg_eigh", "aten::_linalg_svd",
      "aten::linalg_cholesky_ex",  "aten::linalg_qr",    "aten::_linalg_solve_ex"};
  if (name == "aten::repeat_interleave.Tensor") return arguments.back().isNone();
  return names.count(name.substr(0, name.find('.'))) > 0;
}

// Whether an index is a mask, which is converted to positions, or has to be copied to the device.
bool has_blocking_index(const std::string& name, const std::vector<IValue>& arguments) {
  static const std::set<std::string> names{"aten::index.Tensor", "aten::_index_put_impl_",
                                           "aten::_unsafe_index.Tensor"};
  if (!names.count(name) || !arguments[0].toTensor().is_cuda()) return false;
  for (const IValue& value : arguments[1].toList().vec()) {
    if (!value.isTensor()) continue;
    const Tensor& index = value.toTensor();
    if (!index.defined()) continue;
    if (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte) return true;
    if (index.is_cpu() && index.dim() > 0) return true;
  }
  return false;
}

// A copy that may wait: the host may continue before the device has the values.
constexpr const char* STAGED_COPY = "copy of unpinned memory to the device";

// The name of a copy that waits: one that is not asynchronous, or whose host memory is not pinned.
const char* blocking_copy(const Tensor& target, const Tensor& source, bool non_blocking) {
  if (target.is_cuda() == source.is_cuda() || source.numel() == 0) return nullptr;
  const bool is_pinned = (target.is_cuda() ? source : target).is_pinned();
  if (target.is_cuda())
    return !non_blocking ? "copy to the device"
           : !is_pinned  ? STAGED_COPY
                         : nullptr;
  return !non_blocking ? "copy to the host"
         : !is_pinned  ? "copy to unpinned memory of the host"
                       : nullptr;
}

// Returns whether the host waits until the operation is done.
bool report_synchronization(const std::string& name, const std::vector<IValue>& arguments) {
  const char* what = nullptr;
  if (name == "aten::copy_") {
    what = blocking_copy(arguments[0].toTensor(), arguments[1].toTensor(), arguments[2].toBool());
  } else if (name == "aten::_foreach_copy_") {
    const auto targets = arguments[0].toTensorVector(), sources = arguments[1].toTensorVector();
    for (size_t i = 0; i < targets.size() && !what; ++i)
      what = blocking_copy(targets[i], sources[i], arguments[2].toBool());
  } else if (reads_result(name, arguments) || has_blocking_index(name, arguments)) {
    what = name.c_str();
  }
  if (what) paceline_report_synchronization(what);
  return what && what != STAGED_COPY;
}

// The tensors of one call of an operation.
struct Call {
  std::unordered_map<c10::TensorImpl*, Tensor> cpu_of;   // CUDA argument -> CPU alias
  std::unordered_map<c10::TensorImpl*, Tensor> cuda_of;  // CPU alias -> CUDA argument
  Device device{c10::kCUDA, 0};
  bool has_cpu_tensors = false;

  Tensor to_cpu(const Tensor& argument) {
    if (!argument.defined()) return argument;
    if (!argument.is_cuda()) {
      has_cpu_tensors = has_cpu_tensors || (argument.is_cpu() && argument.dim() > 0);
      return argument;
    }
    device = argument.device();
    auto& cpu = cpu_of[argument.unsafeGetTensorImpl()];
    if (!cpu.defined()) {
      cpu = alias(argument, c10::kCPU, DispatchKey::CPU);
      cuda_of[cpu.unsafeGetTensorImpl()] = argument;
    }
    return cpu;
  }

  Tensor to_cuda(const Tensor& result) {
    if (!result.defined() || !result.is_cpu()) return result;
    auto argument = cuda_of.find(result.unsafeGetTensorImpl());
    return argument != cuda_of.end() ? argument->second
                                     : alias(result, device, DispatchKey::CUDA);
  }

  // Applies to the CUDA arguments what the kernel did to their aliases: an `out=` argument may have
  // other sizes or other memory.
  void update_arguments() {
    for (auto& [argument, cpu] : cpu_of) {
      const bool has_moved = argument->storage().data() != cpu.storage().data();
      if (!has_moved && argument->sizes() == cpu.sizes()) continue;
      if (has_moved)
        argument->set_storage_keep_dtype(alias(cpu, device, DispatchKey::CUDA).storage());
      argument->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    }
  }
};

// Applies a function to each tensor of a value.
template <typename Function>
IValue map_tensors(const IValue& value, Function function) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> mapped;
    for (const Tensor& tensor : value.toTensorVector()) mapped.push_back(function(tensor));
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> mapped;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      mapped.push_back(tensor ? std::optional<Tensor>(function(*tensor)) : tensor);
    return mapped;
  }
  if (value.isList() && !value.toListRef().empty() &&
      (value.toListRef()[0].isTensor() || value.toListRef()[0].isTensorList())) {
    auto mapped = value.toList().copy();  // a list of lists, as collectives have
    for (size_t i = 0; i < mapped.size(); ++i)
      mapped.set(i, map_tensors(value.toListRef()[i], function));
    return mapped;
  }
  return value;
}

// Operations for which a kernel of the CPU makes copies of its operands in another data type, and
// the kernel of a GPU converts them in registers. Only their results count.
bool copies_operands(const std::string& name) { return name == "aten::_foreach_norm.Scalar"; }

std::string name_of(const c10::FunctionSchema& schema) {
  const auto overload = schema.overload_name();
  return schema.name() + (overload.empty() ? "" : "." + overload);
}

// Called after each operation on CUDA tensors; see stream_order/observe.cpp.
using OperationObserver = void (*)(const c10::OperatorHandle& op, const std::vector<IValue>& arguments,
                                   const std::vector<IValue>& results, bool host_waits);
std::atomic<OperationObserver> operation_observer{nullptr};
// Whether this thread runs a kernel of the CPU for a device.
thread_local bool runs_kernel = false;
struct KernelGuard {
  const bool previous = std::exchange(runs_kernel, true);
  ~KernelGuard() { runs_kernel = previous; }
};

// Called instead of an operation; returns whether it takes care of it. See stream_order/defer.cpp.
using Interceptor = bool (*)(const c10::OperatorHandle& op, Stack* stack, bool host_waits);
std::atomic<Interceptor> interceptor{nullptr};

// Runs an operation with the kernel of the CPU.
void compute(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto name = name_of(schema);
  Call call;
  for (auto i = stack->size() - schema.arguments().size(); i < stack->size(); ++i) {
    IValue& value = (*stack)[i];
    if (value.isDevice() && value.toDevice().is_cuda()) {
      call.device = value.toDevice();
      value = Device(c10::kCPU);
    } else if (value.isGenerator()) {
      value = IValue();  // the CPU's default generator
    } else {
      value = map_tensors(value, [&](const Tensor& tensor) { return call.to_cpu(tensor); });
    }
  }
  TORCH_CHECK(call.cpu_of.empty() || !call.has_cpu_tensors || accepts_cpu_tensors(name),
              "Expected all tensors to be on the same device, but found at least two devices, ",
              call.device, " and cpu! (in ", name, ")");
  const auto index = call.device.has_index() ? call.device.index() : current_device();
  // The buffers of Gloo are in memory of the host; NCCL's are not tensors.
  const bool is_collective = name.rfind("c10d::", 0) == 0, has_copies = copies_operands(name);
  {
    CountingGuard guard(is_collective || has_copies ? c10::DeviceIndex(-1) : index);
    KernelGuard runs;
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  }
  for (auto i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    (*stack)[i] = map_tensors((*stack)[i], [&](const Tensor& result) {
      CountingGuard guard(index);
      return call.to_cuda(has_copies ? result.clone() : result);
    });
  call.update_arguments();
}

void run_on_cpu(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const auto name = name_of(schema);
  const auto arguments = torch::jit::last(*stack, schema.arguments().size()).vec();
  const bool host_waits = report_synchronization(name, arguments);
  const auto intercept = interceptor.load();
  if (intercept && intercept(op, stack, host_waits)) return;
  compute(op, stack);
  if (const auto observe = operation_observer.load())
    observe(op, arguments, torch::jit::last(*stack, schema.returns().size()).vec(), host_waits);
}

torch::CppFunction fallback() { return torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>(); }

// -- operations on memory, whose results must be CUDA memory or share an argument's storage
Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(Device(c10::kCUDA)));
  return at::detail::empty_generic(size, cuda_allocator(), DispatchKeySet(DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(Device(c10::kCUDA)));
  return at::detail::empty_strided_generic(size, stride, cuda_allocator(),
                                           DispatchKeySet(DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                  std::optional<int64_t> offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride,
                                                    offset.value_or(self.storage_offset()));
  return view;
}

Tensor reshape_alias(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return as_strided(self, size, stride, self.storage_offset());
}

Tensor view(const Tensor& self, at::IntArrayRef size) {
  const auto sizes = at::infer_size_dv(size, self.numel());
  const auto strides = at::detail::computeStride(self.sizes(), self.strides(), sizes);
  TORCH_CHECK(strides.has_value(),
              "view size is not compatible with input tensor's size and stride");
  return as_strided(self, sizes, *strides, self.storage_offset());
}

void reallocate(const c10::Storage& storage, size_t size) {
  auto* impl = storage.unsafeGetStorageImpl();
  c10::DeviceGuard guard(storage.device());
  c10::DataPtr data = cuda_allocator()->allocate(size);
  if (const size_t preserved = std::min(size, impl->nbytes()))
    std::memcpy(data.get(), impl->data(), preserved);
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(size);
}

const Tensor& resize(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const size_t required = (impl->numel() + impl->storage_offset()) * impl->itemsize();
  if (required > impl->storage().nbytes()) reallocate(impl->storage(), required);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                    at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.empty())
    impl->set_sizes_contiguous(size);
  else
    impl->set_sizes_and_strides(size, stride, offset);
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  const auto size = int64_t(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(source), 0, {size}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(),
                     source.strides());
}

void record_stream(Tensor& self, at::Stream stream) {
  c10::impl::getDeviceGuardImpl(c10::kCUDA)
      ->recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

void resize_storage(const Tensor& tensor, int64_t size) {
  reallocate(tensor.storage(), size_t(size));
}

}  // namespace

extern "C" {
void simulated_observe_operations(OperationObserver observe) { operation_observer = observe; }
void simulated_intercept_operations(Interceptor intercept) { interceptor = intercept; }
void simulated_compute(const c10::OperatorHandle& op, Stack* stack) { compute(op, stack); }
bool simulated_runs_kernel() { return runs_kernel; }
}

// torch warns that the collectives below replace those of torch.
struct SilentHandler final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};
static SilentHandler silent;
static c10::WarningHandler* const previous_handler = [] {
  auto* handler = c10::WarningUtils::get_warning_handler();
  c10::WarningUtils::set_warning_handler(&silent);
  return handler;
}();

// UntypedStorage.resize_() cannot resize CUDA memory in the CPU build; FSDP frees and allocates its
// buffers with it.
TORCH_LIBRARY(simulated_cuda, library) {
  library.def("resize_storage(Tensor tensor, int size) -> ()", &resize_storage);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(fallback()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("record_stream", &record_stream);
  library.impl("_foreach_norm.Scalar", fallback());  // has one kernel on a GPU
  library.impl("copy_", fallback());  // torch's kernel for all devices has no inner loop for CUDA
}

// The CPU backend of the process group (Gloo) runs the collectives of CUDA tensors.
TORCH_LIBRARY_IMPL(c10d, CUDA, library) {
  for (const char* name :
       {"allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "barrier", "send", "recv_",
        "recv_any_source_", "gather_", "scatter_", "alltoall_", "alltoall_base_", "allgather_",
        "_allgather_base_", "allgather_into_tensor_coalesced_", "reduce_scatter_",
        "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"})
    library.impl(name, fallback());
}

static const bool has_restored_handler =
    (c10::WarningUtils::set_warning_handler(previous_handler), true);
