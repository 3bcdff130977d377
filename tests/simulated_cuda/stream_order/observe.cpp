// Reports what each operation reads and writes: operations on CUDA tensors, which values.cpp runs,
// and operations of the host on pinned memory. checker.py finds out whether they are ordered.
#define NDEBUG  // as torch is built: it changes the members of at::RecordFunction
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/record_function.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <set>
#include <string>
#include <vector>

namespace {

using at::Tensor;
using c10::IValue;

// A part of a storage that an operation uses. The order of the members is that of tracing.py.
struct Access {
  const void* memory;   // the beginning of the storage
  int64_t begin, end;   // bytes from there
  int64_t stream;       // the current stream of the device
  int32_t device;       // -1: pinned memory of the host
  int32_t writes;
};
using Observer = void (*)(const char* name, const Access* accesses, int count, bool host_waits,
                          bool by_host);
std::atomic<Observer> observer{nullptr};
}  // namespace

// Of values.cpp.
using OperationObserver = void (*)(const c10::OperatorHandle& op, const std::vector<IValue>& arguments,
                                   const std::vector<IValue>& results, bool host_waits);
extern "C" void simulated_observe_operations(OperationObserver observe);
extern "C" bool simulated_runs_kernel();

namespace {

bool is_pinned(const Tensor& tensor) {
  return tensor.is_cpu() && at::detail::getCUDAHooks().isPinnedPtr(tensor.storage().data());
}

bool has_memory(const Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() && tensor.numel() > 0 &&
         tensor.layout() == at::kStrided && !tensor.key_set().has(c10::DispatchKey::Python);
}

void add_access(std::vector<Access>& accesses, const Tensor& tensor, bool writes) {
  if (!has_memory(tensor) || !(tensor.is_cuda() || is_pinned(tensor))) return;
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  const auto size = int64_t(tensor.itemsize()), begin = tensor.storage_offset() * size;
  Access access{tensor.storage().data(), begin, begin + (last + 1) * size, 0, -1, writes};
  if (tensor.is_cuda()) {
    access.device = tensor.device().index();
    access.stream = c10::impl::getDeviceGuardImpl(c10::kCUDA)->getStream(tensor.device()).id();
  }
  accesses.push_back(access);
}

void add_accesses(std::vector<Access>& accesses, const IValue& value, bool writes) {
  if (value.isTensor())
    add_access(accesses, value.toTensor(), writes);
  else if (value.isList())
    for (const IValue& each : value.toListRef()) add_accesses(accesses, each, writes);
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

// Operations that make a view, or use nothing but the size of a tensor.
bool uses_no_values(const c10::FunctionSchema& schema) {
  static const std::set<std::string> names{"aten::set_", "aten::resize_", "aten::is_set_to",
                                           "aten::is_pinned", "aten::record_stream"};
  for (const auto& result : schema.returns())
    if (result.alias_info() && !is_written(result)) return true;
  return names.count(schema.name()) || schema.name().rfind("aten::empty", 0) == 0 ||
         schema.name().rfind("aten::new_empty", 0) == 0;
}

template <typename Values>
void add_arguments(std::vector<Access>& accesses, const c10::FunctionSchema& schema,
                   const Values& values, bool writes_all) {
  for (size_t i = 0; i < values.size() && i < schema.arguments().size(); ++i)
    add_accesses(accesses, values[i], writes_all || is_written(schema.arguments()[i]));
}

void observe_operation(const c10::OperatorHandle& op, const std::vector<IValue>& arguments,
                       const std::vector<IValue>& results, bool host_waits) {
  const auto& schema = op.schema();
  const auto report = observer.load();
  if (!report || uses_no_values(schema)) return;
  std::vector<Access> accesses;
  // The schemas of collectives do not say which tensors are written.
  const bool is_collective = schema.name().rfind("c10d::", 0) == 0;
  add_arguments(accesses, schema, arguments, is_collective);
  for (size_t i = 0; i < results.size(); ++i)
    if (!schema.returns()[i].alias_info()) add_accesses(accesses, results[i], true);
  report(schema.name().c_str(), accesses.data(), int(accesses.size()), host_waits, false);
}

// -- pinned memory
bool any_tensor(const IValue& value, bool (*condition)(const Tensor&)) {
  if (value.isTensor()) return has_memory(value.toTensor()) && condition(value.toTensor());
  if (!value.isList()) return false;
  for (const IValue& each : value.toListRef())
    if (any_tensor(each, condition)) return true;
  return false;
}

// Operations that consist of others are left out, because those are observed.
bool has_host_kernel(const c10::OperatorName& name) {
  static const std::set<std::string> composite{"aten::copy_"};
  const auto op = c10::Dispatcher::singleton().findSchema(name);
  return op && (composite.count(name.name) || op->hasKernelForDispatchKey(c10::DispatchKey::CPU));
}

std::unique_ptr<at::ObserverContext> observe_on_host(const at::RecordFunction& function) {
  const auto report = observer.load();
  if (!report || simulated_runs_kernel()) return nullptr;
  bool has_pinned = false;
  for (const IValue& value : function.inputs()) {
    if (any_tensor(value, [](const Tensor& tensor) { return tensor.is_cuda(); })) return nullptr;
    has_pinned = has_pinned || any_tensor(value, is_pinned);
  }
  const auto name = has_pinned ? function.operator_name() : std::nullopt;
  if (!name || !has_host_kernel(*name)) return nullptr;
  const auto schema = function.operator_schema();
  if (!schema || uses_no_values(*schema)) return nullptr;
  std::vector<Access> accesses;
  add_arguments(accesses, *schema, function.inputs(), false);
  report(schema->name().c_str(), accesses.data(), int(accesses.size()), false, true);
  return nullptr;
}

const bool is_observed = [] {
  simulated_observe_operations(&observe_operation);
  at::addGlobalCallback(at::RecordFunctionCallback(&observe_on_host)
                            .needsInputs(true)
                            .scopes({at::RecordScope::FUNCTION}));
  return true;
}();

}  // namespace

extern "C" void stream_order_observe(Observer observe) { observer = observe; }
