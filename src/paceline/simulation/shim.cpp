// A CUDA device for the CPU build of PyTorch, enough of one for FakeTensorMode, autograd, autocast,
// FSDP2 and DTensor. It owns no device memory and runs no kernel:
//   1. device guard: the current device, streams and events, with no work behind them;
//   2. CUDA hooks:   whether CUDA is available, the number of devices, random generators;
//   3. allocator:    what torch.accelerator.memory_* returns, as numbers that Python sets;
//   4. attention:    which kernel scaled_dot_product_attention selects;
//   5. synchronizations: calls for which the host of a GPU would wait for the device.
// Under FakeTensorMode, the kernels of the meta device compute the shapes, so torch never looks up
// a CUDA kernel.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;

constexpr c10::DeviceType CUDA = c10::DeviceType::CUDA;
constexpr int MAX_DEVICES = 64;

DeviceIndex num_devices = 1;
thread_local DeviceIndex current_device = 0;
thread_local std::map<DeviceIndex, StreamId> current_stream;
std::atomic<StreamId> next_stream{1};  // 0 is the default stream

// Called for each synchronization, with its name and, for that of an event, when the event was
// recorded, in seconds of the steady clock; else a negative number.
using Observer = void (*)(const char* name, double recorded_at);
std::atomic<Observer> observer{nullptr};

void report(const char* name, double recorded_at = -1) {
  if (Observer call = observer.load()) call(name, recorded_at);
}

// -- 1. the device guard
struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  using Clock = std::chrono::steady_clock;
  using Time = Clock::time_point;

  static DeviceIndex index_of(Device device) {
    return device.has_index() ? device.index() : current_device;
  }
  static Stream stream(Device device, StreamId id) {
    return Stream(Stream::UNSAFE, Device(CUDA, index_of(device)), id);
  }

  c10::DeviceType type() const override { return CUDA; }
  DeviceIndex deviceCount() const noexcept override { return num_devices; }
  Device getDevice() const override { return Device(CUDA, current_device); }
  void setDevice(Device device) const override { current_device = index_of(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    current_device = index_of(device);
  }
  Device exchangeDevice(Device device) const override {
    return Device(CUDA, std::exchange(current_device, index_of(device)));
  }

  Stream getStream(Device device) const override {
    return stream(device, current_stream[index_of(device)]);
  }
  Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return stream(device, next_stream++);
  }
  Stream getNewStream(Device device, int) const override { return stream(device, next_stream++); }
  Stream exchangeStream(Stream next) const override {
    Stream previous = getStream(next.device());
    current_stream[next.device_index()] = next.id();
    return previous;
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { report("stream.synchronize"); }
  void synchronizeDevice(const DeviceIndex) const override { report("device.synchronize"); }

  // An event is the host's time at which it was recorded, so elapsed_time() measures the host.
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Time;
    *static_cast<Time*>(*event) = Clock::now();
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    const auto recorded_at = static_cast<Time*>(event)->time_since_epoch();
    report("event.synchronize", std::chrono::duration<double>(recorded_at).count());
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Time*>(event);
  }
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    const auto elapsed = *static_cast<Time*>(end) - *static_cast<Time*>(start);
    return std::chrono::duration<double, std::milli>(elapsed).count();
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, DeviceGuard)

// A generator of the CPU with the key of CUDA.
struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(DeviceIndex index) {
    device_ = Device(CUDA, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  }
};

// -- 2. the hooks
// Pinned memory is ordinary memory, whose addresses are known.
struct PinnedAllocator final : c10::Allocator {
  static std::mutex& mutex() {
    static std::mutex guard;
    return guard;
  }
  static std::set<const void*>& addresses() {
    static std::set<const void*> known;
    return known;
  }
  static void release(void* data) {
    {
      const std::lock_guard lock(mutex());
      addresses().erase(data);
    }
    std::free(data);
  }

  c10::DataPtr allocate(size_t size) override {
    void* data = size ? std::malloc(size) : nullptr;
    const std::lock_guard lock(mutex());
    if (data) addresses().insert(data);
    return {data, data, &release, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t size) const override {
    default_copy_data(target, source, size);
  }
};
PinnedAllocator pinned_allocator;

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return num_devices; }
  int getNumGPUs() const override { return num_devices; }
  DeviceIndex current_device() const override { return ::current_device; }
  DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(DeviceIndex index) const override { ::current_device = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return std::exchange(::current_device, index);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? ::current_device : exchangeDevice(index);
  }
  void deviceSynchronize(DeviceIndex) const override {}
  std::string showConfig() const override { return "simulated CUDA"; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override {
    const std::lock_guard lock(PinnedAllocator::mutex());
    return PinnedAllocator::addresses().count(data) > 0;
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    static const std::vector<at::Generator> generators = [] {
      std::vector<at::Generator> all;
      for (int device = 0; device < MAX_DEVICES; ++device)
        all.push_back(at::make_generator<Generator>(DeviceIndex(device)));
      return all;
    }();
    return generators.at(index < 0 ? ::current_device : index);
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? ::current_device : index);
  }
};

// `import torch` already asks for the hooks and keeps an object without functions, so a later
// registration has no effect. That object gets the function table of Hooks; neither has data.
const bool has_hooks = [] {
  static Hooks hooks;
  static_assert(sizeof(Hooks) == sizeof(void*));
  static_assert(sizeof(at::CUDAHooksInterface) == sizeof(void*));
  auto& in_use = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  *reinterpret_cast<void**>(&in_use) = *reinterpret_cast<void**>(&hooks);
  return true;
}();

// -- 3. the allocator
struct Allocator final : c10::DeviceAllocator {
  std::vector<int64_t> allocated = std::vector<int64_t>(MAX_DEVICES);
  std::vector<int64_t> peak = std::vector<int64_t>(MAX_DEVICES);
  std::vector<int64_t> total = std::vector<int64_t>(MAX_DEVICES);

  // Tensors that are not fake get memory of the host.
  c10::DataPtr allocate(size_t size) override {
    void* data = size ? std::malloc(size) : nullptr;
    return {data, data, &std::free, Device(CUDA, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* target, const void* source, size_t size) const override {
    default_copy_data(target, source, size);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, Stream) override {}
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex index) override { peak.at(index) = allocated.at(index); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex index) override {
    return {size_t(total.at(index) - allocated.at(index)), size_t(total.at(index))};
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex index) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes,
                        &stats.requested_bytes}) {
      (*bytes)[0].current = allocated.at(index);
      (*bytes)[0].peak = peak.at(index);
    }
    return stats;
  }
};
Allocator allocator;
const bool has_allocator = (c10::SetAllocator(CUDA, &allocator, 255), true);

// -- 4. attention
// Without a choice for CUDA, the CPU build silently selects the kernel of matrix products and
// softmax, which holds the scores of the whole sequence. These are the rules of a recent GPU,
// without cuDNN.
bool has_fused_attention = true;

int64_t choose_attention(const at::Tensor& query, const at::Tensor&, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask, double, bool,
                         std::optional<double>, bool is_grouped) {
  if (!has_fused_attention) return int64_t(at::SDPBackend::math);
  auto& context = at::globalContext();
  const auto dtype = query.scalar_type();
  const bool is_half = dtype == at::kHalf || dtype == at::kBFloat16;
  const auto width = query.sym_size(-1);
  if (context.userEnabledFlashSDP() && is_half && !mask && query.dim() == 4 && width <= 256 &&
      width == value.sym_size(-1))
    return int64_t(at::SDPBackend::flash_attention);
  if (context.userEnabledMemEfficientSDP() && query.dim() == 4 && !is_grouped)
    return int64_t(at::SDPBackend::efficient_attention);
  TORCH_CHECK(context.userEnabledMathSDP(), "No available kernel. Aborting execution.");
  return int64_t(at::SDPBackend::math);
}
const bool has_choice =
    (at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention), true);

}  // namespace

extern "C" {
void paceline_set_devices(int count, int64_t memory_bytes) {
  num_devices = DeviceIndex(count);
  std::fill(allocator.total.begin(), allocator.total.end(), memory_bytes);
}
void paceline_set_allocated(int index, int64_t size_bytes) {
  allocator.allocated.at(index) = size_bytes;
  allocator.peak.at(index) = std::max(allocator.peak.at(index), size_bytes);
}
// Real tensors need this: the fused kernels of CUDA have no counterpart on a CPU.
void paceline_use_math_attention() { has_fused_attention = false; }
void paceline_observe_synchronizations(Observer call) { observer = call; }
// For operations of real tensors, which values.cpp of the tests runs.
void paceline_report_synchronization(const char* name) { report(name); }
}
