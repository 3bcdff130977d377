// Defers the work of side streams until something waits for it, so that a missing wait gives wrong
// values. Deferred are operations that only write to their arguments: copies, in-place operations
// and those with `out=`. At random moments, drawn from a seed, a part of the deferred work of a
// stream runs early. The default stream runs its work at once, in order; a collective of hostnccl
// is deferred by hostnccl itself.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

using at::Tensor;
using c10::IValue;
using Operands = std::vector<IValue>;

// Of shim.cpp and values.cpp.
using OrderObserver = void (*)(const char* what, int device, int64_t stream, const void* object);
using Interceptor = bool (*)(const c10::OperatorHandle& op, Operands* stack, bool host_waits);
extern "C" void paceline_observe_order(OrderObserver call);
extern "C" void simulated_intercept_operations(Interceptor intercept);
extern "C" void simulated_compute(const c10::OperatorHandle& op, Operands* stack);

namespace {

using StreamKey = std::pair<int, int64_t>;  // device, number of the stream

// A position in the work of a stream.
struct Point {
  StreamKey stream;
  int64_t number = 0;
};
// An operation, or a wait for another stream.
struct Task {
  std::optional<c10::OperatorHandle> op;
  Operands arguments;
  Point waited_for;
};
struct Queue {
  std::deque<Task> tasks;
  int64_t num_issued = 0, num_done = 0;
};

std::recursive_mutex mutex;
std::map<StreamKey, Queue> queues;
std::map<const void*, Point> events;
std::mt19937_64 draws;
// Tasks that are done. They are destroyed without the mutex, because that may need Python's lock.
using Finished = std::vector<Task>;

bool is_side(const StreamKey& stream) { return stream.second != 0; }

// Memory of the host that is not pinned: an operation reads it when it is issued.
bool is_pageable(const Tensor& tensor) {
  return tensor.is_cpu() && !at::detail::getCUDAHooks().isPinnedPtr(tensor.storage().data());
}

// A tensor over the same memory, with the present sizes and without a Python object; a copy of a
// number of the host.
Tensor fixed(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  auto* impl = tensor.unsafeGetTensorImpl();
  if (!is_pageable(tensor))
    return Tensor(impl->shallow_copy_and_detach(c10::VariableVersion(0), false));
  Tensor number = tensor.clone();
  if (impl->is_wrapped_number()) number.unsafeGetTensorImpl()->set_wrapped_number(true);
  return number;
}

void check_memory(const c10::OperatorHandle& op, const Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0) return;
  TORCH_CHECK(tensor.storage().data() != nullptr, "memory of ", op.schema().name(),
              ", which is deferred, was freed before a stream or the host waited for it");
}

// Applies a function to the tensors of a value; returns a value of its results.
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
  return value;
}

void run_until(const Point& point, Finished& finished) {
  Queue& queue = queues[point.stream];
  while (queue.num_done < point.number && !queue.tasks.empty()) {
    Task task = std::move(queue.tasks.front());
    queue.tasks.pop_front();
    ++queue.num_done;
    if (task.op) {
      for (const IValue& value : task.arguments)
        map_tensors(value, [&](const Tensor& tensor) {
          check_memory(*task.op, tensor);
          return tensor;
        });
      Operands stack = task.arguments;
      simulated_compute(*task.op, &stack);
    } else {
      run_until(task.waited_for, finished);
    }
    finished.push_back(std::move(task));
  }
}

void run_all_of(const StreamKey& stream, Finished& finished) {
  run_until({stream, queues[stream].num_issued}, finished);
}

void add(const StreamKey& stream, Task task) {
  Queue& queue = queues[stream];
  queue.tasks.push_back(std::move(task));
  ++queue.num_issued;
}

// Runs some of the work of a stream, or of none.
void run_early(Finished& finished) {
  if (queues.empty()) return;
  const auto number = draws() % (4 * queues.size());
  if (number >= queues.size()) return;
  const auto& [stream, queue] = *std::next(queues.begin(), std::ptrdiff_t(number));
  if (const auto waiting = queue.tasks.size())
    run_until({stream, queue.num_done + 1 + int64_t(draws() % waiting)}, finished);
}

// -- operations
bool any_tensor(const IValue& value, bool (*condition)(const Tensor&)) {
  bool found = false;
  map_tensors(value, [&](const Tensor& tensor) {
    found = found || (tensor.defined() && condition(tensor));
    return tensor;
  });
  return found;
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

// The written arguments are also the results, if the operation has any.
bool is_deferrable(const c10::FunctionSchema& schema, const Operands& arguments) {
  if (schema.name().rfind("c10d::", 0) == 0) return false;
  for (const auto& result : schema.returns())
    if (!is_written(result)) return false;
  size_t num_written = 0;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& argument = schema.arguments()[i];
    if (arguments[i].isGenerator() || argument.name() == "generator") return false;
    if (any_tensor(arguments[i],
                   [](const Tensor& tensor) { return tensor.dim() > 0 && is_pageable(tensor); }))
      return false;
    if (!is_written(argument)) continue;
    ++num_written;
    // An output that is empty gets its size from the operation.
    if (any_tensor(arguments[i], [](const Tensor& tensor) { return tensor.numel() == 0; }))
      return false;
  }
  return num_written > 0 && (schema.returns().empty() || schema.returns().size() == num_written);
}

int device_of(const Operands& arguments) {
  int device = -1;
  for (const IValue& value : arguments)
    map_tensors(value, [&](const Tensor& tensor) {
      if (device < 0 && tensor.defined() && tensor.is_cuda()) device = tensor.device().index();
      return tensor;
    });
  return device;
}

bool intercept(const c10::OperatorHandle& op, Operands* stack, bool host_waits) {
  const auto& schema = op.schema();
  const auto arguments = torch::jit::last(*stack, schema.arguments().size()).vec();
  const int device = device_of(arguments);
  if (device < 0) return false;
  const auto* guard = c10::impl::getDeviceGuardImpl(c10::kCUDA);
  const StreamKey stream{
      device, guard->getStream(c10::Device(c10::kCUDA, c10::DeviceIndex(device))).id()};
  Finished finished;
  const std::lock_guard lock(mutex);
  run_early(finished);
  if (!is_side(stream)) return false;
  if (host_waits || !is_deferrable(schema, arguments)) {
    run_all_of(stream, finished);
    return false;
  }
  Task task{op, {}, {}};
  for (const IValue& value : arguments) task.arguments.push_back(map_tensors(value, &fixed));
  add(stream, std::move(task));
  torch::jit::drop(*stack, schema.arguments().size());
  if (schema.returns().empty()) return true;
  for (size_t i = 0; i < arguments.size(); ++i)
    if (is_written(schema.arguments()[i])) stack->push_back(arguments[i]);
  return true;
}

// -- events
void observe_order(const char* what, int device, int64_t number, const void* object) {
  const StreamKey stream{device, number};
  const auto is = [&](const char* name) { return std::strcmp(what, name) == 0; };
  if (std::strncmp(what, "memory.", 7) == 0) return;
  Finished finished;
  const std::lock_guard lock(mutex);
  if (is("event.record")) {
    events[object] = {stream, queues[stream].num_issued};
  } else if (is("event.destroy")) {
    events.erase(object);
  } else if (is("event.wait")) {
    const auto event = events.find(object);
    if (event == events.end()) return;
    if (is_side(stream))
      add(stream, {std::nullopt, {}, event->second});
    else
      run_until(event->second, finished);
  } else if (is("event.synchronize")) {
    const auto event = events.find(object);
    if (event != events.end()) run_until(event->second, finished);
  } else if (is("stream.synchronize")) {
    run_all_of(stream, finished);
  } else if (is("device.synchronize")) {
    for (const auto& [each, queue] : queues)
      if (each.first == device) run_all_of(each, finished);
  }
}

}  // namespace

extern "C" void stream_order_defer(int64_t seed) {
  draws.seed(uint64_t(seed));
  paceline_observe_order(&observe_order);
  simulated_intercept_operations(&intercept);
}
