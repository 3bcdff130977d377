// A CUDA device for the CPU build of PyTorch, enough of one for FakeTensorMode, autograd, autocast,
// FSDP2 and DTensor. It has no memory of its own and runs no kernel:
//   1. device guard: the current device, streams and events, with no work behind them;
//   2. CUDA hooks:   whether CUDA is available, the number of devices, random generators;
//   3. allocator:    memory of the host, counted as memory of a device, with a limit;
//   4. attention:    which kernel scaled_dot_product_attention selects;
//   5. synchronizations: calls for which the host of a GPU would wait for the device;
//   6. order of streams: what streams, events and memory are used for, for a checker of the tests.
// Under FakeTensorMode, the kernels of the meta device compute the shapes, so torch never looks up
// a CUDA kernel.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
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

// Called for each synchronization, with its name and, if it waits for an event, when the event was
// recorded, in seconds of the steady clock; else a negative number.
using Observer = void (*)(const char* name, double recorded_at);
std::atomic<Observer> observer{nullptr};

void report(const char* name, double recorded_at = -1) {
  if (Observer call = observer.load()) call(name, recorded_at);
}

// Called for what orders the work of streams: events, waits, and the memory of devices and pinned
// memory. `object` is the address of an event or of memory.
using OrderObserver = void (*)(const char* what, int device, int64_t stream, const void* object);
std::atomic<OrderObserver> order_observer{nullptr};

void report_order(const char* what, const Stream& stream, const void* object = nullptr) {
  if (OrderObserver call = order_observer.load())
    call(what, stream.device_index(), stream.id(), object);
}
void report_order(const char* what, const void* object) {
  if (OrderObserver call = order_observer.load()) call(what, -1, -1, object);
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
  // The work of a stream is done when it has been issued, so the host may rely on it.
  bool queryStream(const Stream& stream) const override {
    report_order("stream.synchronize", stream);
    return true;
  }
  void synchronizeStream(const Stream& stream) const override {
    report("stream.synchronize");
    report_order("stream.synchronize", stream);
  }
  void synchronizeDevice(const DeviceIndex index) const override {
    report("device.synchronize");
    report_order("device.synchronize", stream(Device(CUDA, index), 0));
  }

  // An event is the host's time at which it was recorded, so elapsed_time() measures the host.
  void record(void** event, const Stream& stream, const DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new Time;
    *static_cast<Time*>(*event) = Clock::now();
    report_order("event.record", stream, *event);
  }
  void block(void* event, const Stream& stream) const override {
    report_order("event.wait", stream, event);
  }
  bool queryEvent(void* event) const override {
    report_order("event.synchronize", event);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    const auto recorded_at = static_cast<Time*>(event)->time_since_epoch();
    report("event.synchronize", std::chrono::duration<double>(recorded_at).count());
    report_order("event.synchronize", event);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    report_order("event.destroy", event);
    delete static_cast<Time*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    report_order("memory.record_stream", stream, data.get());
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
    report_order("memory.free", data);
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
std::string format_size(int64_t size) {
  static const char* const units[] = {"bytes", "KiB", "MiB", "GiB"};
  int unit = 0;
  double value = double(size);
  for (; value >= 1024 && unit < 3; ++unit) value /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, unit ? "%.2f %s" : "%.0f %s", value, units[unit]);
  return text;
}

// Tensors that are not fake get memory of the host. Their sizes are rounded up as CUDA's caching
// allocator rounds them. Nothing is cached: what is allocated is also what is reserved.
struct Allocator final : c10::DeviceAllocator {
  using Stat = c10::CachingAllocator::Stat;
  using Stats = c10::CachingDeviceAllocator::DeviceStats;
  struct Block {
    DeviceIndex device;
    size_t requested, size;
  };

  std::mutex mutex;
  std::unordered_map<const void*, Block> blocks;
  std::vector<Stats> stats = std::vector<Stats>(MAX_DEVICES);
  std::vector<double> fraction = std::vector<double>(MAX_DEVICES, 1.0);  // that may be allocated
  int64_t total = 0;       // bytes of each device
  size_t block_bytes = 1;  // sizes are multiples of this

  // Never destroyed: tensors may be freed while the process ends.
  static Allocator& instance() {
    static auto* allocator = new Allocator;
    return *allocator;
  }

  c10::DataPtr allocate(size_t size) override {
    const Device device(CUDA, current_device);
    void* data = size ? add_block(current_device, size) : nullptr;
    if (data && order_observer.load())
      report_order("memory.allocate", DeviceGuard().getStream(device), data);
    return {data, data, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t size) const override {
    default_copy_data(target, source, size);
  }

  void* add_block(DeviceIndex device, size_t requested) {
    const Block block{device, requested, (requested + block_bytes - 1) / block_bytes * block_bytes};
    const std::lock_guard lock(mutex);
    check_limit(block);
    void* data = c10::alloc_cpu(block.size);
    blocks[data] = block;
    count(block, [](Stat& stat, size_t by) { stat.increase(by); });
    return data;
  }
  bool has_block(const void* data) {
    const std::lock_guard lock(mutex);
    return blocks.count(data) > 0;
  }
  // Returns false if the memory is not of this allocator.
  bool release_block(void* data) {
    if (order_observer.load() && has_block(data)) report_order("memory.free", data);
    const std::lock_guard lock(mutex);
    const auto found = blocks.find(data);
    if (found == blocks.end()) return false;
    count(found->second, [](Stat& stat, size_t by) { stat.decrease(by); });
    blocks.erase(found);
    c10::free_cpu(data);
    return true;
  }
  static void release(void* data) { instance().release_block(data); }

  template <typename Change>
  void count(const Block& block, Change change) {
    auto& all = stats.at(block.device);
    for (auto* number : {&all.allocation, &all.active}) change((*number)[0], 1);
    for (auto* bytes : {&all.allocated_bytes, &all.active_bytes, &all.reserved_bytes})
      change((*bytes)[0], block.size);
    change(all.requested_bytes[0], block.requested);
  }
  void check_limit(const Block& block) {
    auto& all = stats.at(block.device);
    const int64_t allocated = all.allocated_bytes[0].current;
    const auto allowed = int64_t(fraction.at(block.device) * double(total));
    if (allocated + int64_t(block.size) <= allowed) return;
    ++all.num_ooms;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ",
                     format_size(block.size), ". GPU ", int(block.device),
                     " has a total capacity of ", format_size(total), " of which ",
                     format_size(total - allocated), " is free. ", format_size(allowed),
                     " allowed; Of the allocated memory ", format_size(allocated),
                     " is allocated by PyTorch. The device is simulated.");
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, Stream stream) override {
    report_order("memory.record_stream", stream, data.get());
  }

  template <typename Reset>
  void reset(DeviceIndex index, Reset reset) {
    const std::lock_guard lock(mutex);
    auto& all = stats.at(index);
    for (auto* stat : {&all.allocation, &all.active, &all.allocated_bytes, &all.active_bytes,
                       &all.reserved_bytes, &all.requested_bytes})
      reset((*stat)[0]);
  }
  void resetAccumulatedStats(DeviceIndex index) override {
    reset(index, [](Stat& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(DeviceIndex index) override {
    reset(index, [](Stat& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex index) override {
    const std::lock_guard lock(mutex);
    return {size_t(total - stats.at(index).allocated_bytes[0].current), size_t(total)};
  }
  Stats getDeviceStats(DeviceIndex index) override {
    const std::lock_guard lock(mutex);
    return stats.at(index);
  }
};
const bool has_allocator = (c10::SetAllocator(CUDA, &Allocator::instance(), 255), true);

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
void paceline_set_devices(int count, int64_t memory_bytes, int64_t block_bytes) {
  num_devices = DeviceIndex(count);
  Allocator::instance().total = memory_bytes;
  Allocator::instance().block_bytes = size_t(block_bytes);
}
void paceline_set_memory_fraction(int index, double fraction) {
  Allocator::instance().fraction.at(index) = fraction;
}
double paceline_memory_fraction(int index) { return Allocator::instance().fraction.at(index); }
// Real tensors need this: the fused kernels of CUDA have no counterpart on a CPU.
void paceline_use_math_attention() { has_fused_attention = false; }
void paceline_observe_synchronizations(Observer call) { observer = call; }
void paceline_observe_order(OrderObserver call) { order_observer = call; }
// For operations of real tensors, which values.cpp of the tests runs.
bool paceline_release(void* data) { return Allocator::instance().release_block(data); }
void paceline_report_synchronization(const char* name) { report(name); }
}
