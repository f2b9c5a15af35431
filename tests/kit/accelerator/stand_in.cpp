// A stand-in for an accelerator, for tests: torch's PrivateUse1 with memory that the host cannot touch.
//
// - A device is two mappings of the same size. Tensors show addresses in the first, which has no access rights; the
//   numbers lie at the same offset in the second, which only this file knows. Who follows a data_ptr() dies.
// - A stream is a queue with a thread. Copies and kernels are queued, and end late: `copy_delay`, `sleep` and `gate`.
// - Memory is given back in the order of its stream, and is written over then. Copies on other streams that are still
//   to come find rubbish, unless `record_stream` was called.
// - What the device has no kernel for runs on the host, through copies, once its stream has finished.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <pthread.h>
#include <sys/mman.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <set>
#include <thread>

extern "C" {  // of Python, whose headers are not needed for this
int PyGILState_Check(void);
void* PyEval_SaveThread(void);
void PyEval_RestoreThread(void*);
}

namespace {

// Threads that wait let Python go on: a stream that gives back memory of Python's needs the interpreter lock.
struct InterpreterLockReleased {
  void* kept = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~InterpreterLockReleased() {
    if (kept) PyEval_RestoreThread(kept);
  }
};

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using Clock = std::chrono::steady_clock;
constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;
constexpr size_t kReserved = size_t(256) << 30;  // addresses of a device, of which few ever have memory
constexpr size_t kGranule = 512;
constexpr size_t kLarge = size_t(1) << 20;  // the system gets it back when it is freed
constexpr int kFreed = 0xDD, kFresh = 0xA5;  // a float of neither is near what a training run has
constexpr size_t kStreams = 32;  // of a device; then they are given out again

// One lock and one condition for all that threads wait for: nothing here has to be fast.
struct Shared {
  std::mutex mutex;
  std::condition_variable changed;
};
Shared& shared() {
  static auto* it = new Shared;  // never destroyed: threads outlive main
  return *it;
}
using Lock = std::unique_lock<std::mutex>;

std::atomic<bool> is_used{false}, is_forked{false}, draws_from_host{false};
std::atomic<int64_t> copy_delay_us{0};
std::string& failure() {  // of a kernel, for whoever waits next
  static auto* it = new std::string;
  return *it;
}

void raise_failure() {
  std::string found;
  {
    Lock lock(shared().mutex);
    std::swap(found, failure());
  }
  TORCH_CHECK(found.empty(), "a kernel of the stand-in accelerator failed: ", found);
}

struct Mark {  // a point in the work of a stream
  bool is_done = false;
  Clock::time_point time;
  void wait() {
    InterpreterLockReleased released;
    Lock lock(shared().mutex);
    shared().changed.wait(lock, [&] { return is_done; });
  }
  void finish() {
    Lock lock(shared().mutex);
    is_done = true;
    time = Clock::now();
    shared().changed.notify_all();
  }
};
using MarkPtr = std::shared_ptr<Mark>;

class Queue {
 public:
  explicit Queue(DeviceIndex device) : device_(device) {}

  void put(std::function<void()> work) {
    Lock lock(shared().mutex);
    if (!is_running_) {
      is_running_ = true;
      std::thread([this] { run(); }).detach();
    }
    work_.push_back(std::move(work));
    ++num_put_;
    shared().changed.notify_all();
  }
  MarkPtr mark() {
    auto made = std::make_shared<Mark>();
    put([made] { made->finish(); });
    return made;
  }
  void wait_for(MarkPtr mark) {
    put([mark] { mark->wait(); });
  }
  bool is_idle() {
    Lock lock(shared().mutex);
    return num_done_ == num_put_;
  }
  void synchronize() {
    {
      InterpreterLockReleased released;
      Lock lock(shared().mutex);
      const auto until = num_put_;
      shared().changed.wait(lock, [&] { return num_done_ >= until; });
    }
    raise_failure();
  }

 private:
  void run() {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (;;) {
      std::function<void()> work;
      {
        Lock lock(shared().mutex);
        shared().changed.wait(lock, [&] { return !work_.empty(); });
        work = std::move(work_.front());
        work_.pop_front();
      }
      std::string error;
      try {
        work();
      } catch (const std::exception& caught) {
        error = caught.what();
      }
      Lock lock(shared().mutex);
      if (!error.empty() && failure().empty()) failure() = error;
      ++num_done_;
      shared().changed.notify_all();
    }  // what the work held on to goes when nobody waits for it any more
  }

  DeviceIndex device_;
  std::deque<std::function<void()>> work_;
  uint64_t num_put_ = 0, num_done_ = 0;
  bool is_running_ = false;
};

struct Block {
  DeviceIndex device;
  char* shown;
  size_t size;  // a power of two of granules
  Queue* owner;
  std::set<Queue*> users;  // by record_stream
};

struct Memory {  // of one device
  char *shown = nullptr, *real = nullptr;
  size_t used_up = 0;  // addresses that were given out once
  std::map<size_t, std::vector<char*>> free;  // by size
  size_t allocated = 0, peak = 0, total = 0, num_allocations = 0, limit = size_t(16) << 30;
  std::vector<Queue*> queues;
  size_t next_queue = 0;
  bool has_context = false;
  at::Generator generator;

  bool owns(const void* address) const {
    return shown && address >= shown && address < shown + kReserved;
  }
};

Memory& memory_of(DeviceIndex index) {
  static auto* all = [] {
    auto* made = new std::array<Memory, kDevices>;
    for (auto& one : *made) {
      one.generator = at::detail::createCPUGenerator();
      one.queues.push_back(new Queue(DeviceIndex(&one - made->data())));
    }
    pthread_atfork(nullptr, nullptr, [] { is_forked = is_used.load(); });
    return made;
  }();
  TORCH_CHECK(index >= 0 && index < kDevices, "invalid device ordinal ", int(index), ": there are ", int(kDevices));
  return (*all)[index];
}

// Say that a device is worked on: the first time it takes memory of it on a real one.
Memory& enter(DeviceIndex index) {
  TORCH_CHECK(!is_forked, "a forked process cannot use an accelerator that its parent has used: spawn it");
  is_used = true;
  auto& memory = memory_of(index);
  Lock lock(shared().mutex);
  if (!memory.shown) {
    const auto map = [](int rights) {
      void* found = mmap(nullptr, kReserved, rights, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      TORCH_CHECK(found != MAP_FAILED, "the system has no addresses left for the stand-in accelerator");
      return static_cast<char*>(found);
    };
    memory.shown = map(PROT_NONE);
    memory.real = map(PROT_READ | PROT_WRITE);
  }
  memory.has_context = true;
  return memory;
}

char* real_address(const void* shown) {
  for (DeviceIndex index = 0; index < kDevices; ++index) {
    auto& memory = memory_of(index);
    if (memory.owns(shown)) return memory.real + (static_cast<const char*>(shown) - memory.shown);
  }
  TORCH_CHECK(false, "this is no memory of the stand-in accelerator");
}

thread_local DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, kDevices> current_streams{};

Stream current_stream(DeviceIndex index) {
  return Stream(Stream::UNSAFE, Device(kType, index), current_streams.at(index));
}
Queue& queue_of(const Stream& stream) {
  auto& memory = enter(stream.device_index());
  Lock lock(shared().mutex);
  return *memory.queues.at(stream.id());
}
Queue& queue_of(const Tensor& tensor) {
  return queue_of(current_stream(tensor.device().index()));
}
Stream new_stream(Device device) {
  auto& memory = enter(device.index());
  Lock lock(shared().mutex);
  auto id = 1 + memory.next_queue++ % kStreams;
  if (id == memory.queues.size()) memory.queues.push_back(new Queue(device.index()));
  return Stream(Stream::UNSAFE, Device(kType, device.index()), c10::StreamId(id));
}
void synchronize_device(DeviceIndex index) {
  auto& memory = memory_of(index);
  for (size_t id = 0;; ++id) {
    Queue* queue = nullptr;
    {
      Lock lock(shared().mutex);
      if (id >= memory.queues.size()) return;
      queue = memory.queues[id];
    }
    queue->synchronize();
  }
}

struct Allocator final : c10::DeviceAllocator {
  static void free_block(void* context) {
    auto* block = static_cast<Block*>(context);
    if (is_forked) return;
    auto& memory = memory_of(block->device);
    {
      Lock lock(shared().mutex);
      memory.allocated -= block->size;
    }
    for (auto* user : block->users) block->owner->wait_for(user->mark());
    block->owner->put([block, &memory] {
      auto* real = memory.real + (block->shown - memory.shown);
      std::memset(real, kFreed, block->size);
      if (block->size >= kLarge) madvise(real, block->size, MADV_DONTNEED);
      Lock lock(shared().mutex);
      memory.free[block->size].push_back(block->shown);
      delete block;
    });
  }

  c10::DataPtr allocate(size_t size_bytes) override {
    const Device device(kType, current_device);
    if (!size_bytes) return c10::DataPtr(nullptr, device);
    auto& memory = enter(current_device);
    auto& owner = queue_of(current_stream(current_device));
    const size_t size = std::max(kGranule, c10::llvm::NextPowerOf2(size_bytes - 1));
    char* shown = nullptr;
    {
      Lock lock(shared().mutex);
      TORCH_CHECK_WITH(
          OutOfMemoryError, memory.allocated + size <= memory.limit, "standin out of memory. Tried to allocate ", size,
          " bytes. Device ", int(current_device), " has ", memory.limit, " bytes, of which ", memory.allocated,
          " are in use");
      auto& free = memory.free[size];
      if (!free.empty()) {
        shown = free.back();
        free.pop_back();
      } else {
        TORCH_CHECK_WITH(OutOfMemoryError, memory.used_up + size <= kReserved, "standin has no addresses left");
        shown = memory.shown + memory.used_up;
        memory.used_up += size;
      }
      memory.allocated += size;
      memory.peak = std::max(memory.peak, memory.allocated);
      memory.total += size;
      ++memory.num_allocations;
    }
    std::memset(memory.real + (shown - memory.shown), kFresh, size_bytes);
    auto* block = new Block{current_device, shown, size, &owner, {}};
    return {shown, block, &free_block, device};
  }

  void recordStream(const c10::DataPtr& pointer, Stream stream) override {
    if (pointer.get_deleter() != &free_block) return;
    auto* block = static_cast<Block*>(pointer.get_context());
    auto& queue = queue_of(stream);
    Lock lock(shared().mutex);
    if (&queue != block->owner) block->users.insert(&queue);
  }
  void copy_data(void* target, const void* source, size_t size_bytes) const override {
    synchronize_device(current_device);
    std::memcpy(real_address(target), real_address(source), size_bytes);
  }
  bool initialized() override {
    return is_used;
  }
  void emptyCache(c10::MempoolId_t) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex index) override {
    auto& memory = memory_of(index);
    Lock lock(shared().mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& bytes = stats.allocated_bytes[0];
    bytes.current = int64_t(memory.allocated);
    bytes.peak = int64_t(memory.peak);
    bytes.allocated = int64_t(memory.total);
    bytes.freed = int64_t(memory.total - memory.allocated);
    stats.reserved_bytes = stats.active_bytes = stats.requested_bytes = stats.allocated_bytes;
    stats.num_device_alloc = int64_t(memory.num_allocations);
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex index) override {
    Lock lock(shared().mutex);
    memory_of(index).total = memory_of(index).allocated;
  }
  void resetPeakStats(DeviceIndex index) override {
    Lock lock(shared().mutex);
    memory_of(index).peak = memory_of(index).allocated;
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex index) override {
    auto& memory = memory_of(index);
    Lock lock(shared().mutex);
    return {memory.limit - std::min(memory.limit, memory.allocated), memory.limit};
  }
};

// Host memory that copies may go to and come from at any time.
struct PinnedAllocator final : at::HostAllocator {
  std::map<char*, size_t> blocks;

  static PinnedAllocator& get() {
    static auto* it = new PinnedAllocator;
    return *it;
  }
  static void free_block(void* pointer) {
    auto& self = get();
    Lock lock(shared().mutex);
    auto found = self.blocks.find(static_cast<char*>(pointer));
    munmap(pointer, found->second);
    self.blocks.erase(found);
  }
  c10::DataPtr allocate(size_t size_bytes) override {
    if (!size_bytes) return {nullptr, Device(c10::kCPU)};
    enter(current_device);  // as CUDA does, which takes memory of the device
    void* made = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK_WITH(OutOfMemoryError, made != MAP_FAILED, "no memory for ", size_bytes, " pinned bytes");
    Lock lock(shared().mutex);
    blocks[static_cast<char*>(made)] = size_bytes;
    return {made, made, &free_block, Device(c10::kCPU)};
  }
  bool is_pinned(const void* pointer) {
    Lock lock(shared().mutex);
    auto* address = static_cast<char*>(const_cast<void*>(pointer));
    auto after = blocks.upper_bound(address);
    return after != blocks.begin() && address < std::prev(after)->first + std::prev(after)->second;
  }
  size_t pinned_bytes() {
    Lock lock(shared().mutex);
    size_t sum = 0;
    for (auto& block : blocks) sum += block.second;
    return sum;
  }
  void copy_data(void* target, const void* source, size_t size_bytes) const override {
    std::memcpy(target, source, size_bytes);
  }
  bool record_event(void*, void*, Stream) override {
    return true;  // queued copies hold their tensors
  }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    return {};
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

struct Event {
  DeviceIndex device;
  MarkPtr mark;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  Device exchangeDevice(Device device) const override {
    return Device(kType, std::exchange(current_device, device.index()));
  }
  Device getDevice() const override {
    return Device(kType, current_device);
  }
  void setDevice(Device device) const override {
    enter(device.index());
    current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    current_device = device.index();
  }
  Stream getStream(Device device) const override {
    return current_stream(device.has_index() ? device.index() : current_device);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, device);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return new_stream(device);
  }
  Stream getNewStream(Device device, int) const override {
    return new_stream(device);
  }
  Stream exchangeStream(Stream stream) const override {
    auto before = current_stream(stream.device_index());
    current_streams.at(stream.device_index()) = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override {
    return &queue_of(stream);
  }
  DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
  bool queryStream(const Stream& stream) const override {
    return queue_of(stream).is_idle();
  }
  void synchronizeStream(const Stream& stream) const override {
    queue_of(stream).synchronize();
  }
  void synchronizeDevice(const DeviceIndex index) const override {
    synchronize_device(index);
  }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event{stream.device_index(), nullptr};
    static_cast<Event*>(*event)->mark = queue_of(stream).mark();
  }
  void block(void* event, const Stream& stream) const override {
    if (event) queue_of(stream).wait_for(static_cast<Event*>(event)->mark);
  }
  bool queryEvent(void* event) const override {
    Lock lock(shared().mutex);
    return !event || static_cast<Event*>(event)->mark->is_done;
  }
  void synchronizeEvent(void* event) const override {
    if (event) static_cast<Event*>(event)->mark->wait();
    raise_failure();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    auto &begin = *static_cast<Event*>(first)->mark, &end = *static_cast<Event*>(second)->mark;
    Lock lock(shared().mutex);
    TORCH_CHECK(begin.is_done && end.is_done, "an event is not recorded yet");
    return std::chrono::duration<double, std::milli>(end.time - begin.time).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream& stream) const override {
    static_cast<c10::DeviceAllocator*>(c10::GetAllocator(kType))->recordStream(pointer, stream);
  }
};

// The same numbers, as a tensor of the host: for work that a queue runs.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor.detach();
  auto* address = tensor.numel() ? real_address(tensor.const_data_ptr()) : nullptr;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  auto found = at::from_blob(address, tensor.sizes(), tensor.strides(), options);
  found._set_conj(tensor.is_conj());
  found._set_neg(tensor.is_neg());
  return found;
}

void copy_late(const Tensor& target, const Tensor& source) {
  if (auto delay = copy_delay_us.load()) std::this_thread::sleep_for(std::chrono::microseconds(delay));
  target.copy_(source);
}

Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  if (!target.numel()) return target;
  const auto source = self.detach().expand(target.sizes());
  if (self.is_privateuseone() && target.is_privateuseone()) {
    auto &from = queue_of(self), &to = queue_of(target);
    if (&from != &to) from.wait_for(to.mark());
    from.put([to = on_host(target), source = on_host(source)] { copy_late(to, source); });
    if (&from != &to) to.wait_for(from.mark());
    return target;
  }
  auto& queue = queue_of(self.is_privateuseone() ? self : target);
  auto given = on_host(source);
  if (non_blocking && self.is_cpu() && !PinnedAllocator::get().is_pinned(self.const_data_ptr())) {
    given = source.clone();  // pageable memory is read at once
  }
  queue.put([to = on_host(target), given] { copy_late(to, given); });
  if (!non_blocking) queue.synchronize();
  return target;
}

void resize_storage(const c10::Storage& storage, size_t size_bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  TORCH_CHECK(impl->resizable(), "Trying to resize storage that is not resizable");
  const c10::DeviceGuard guard(impl->device());
  auto made = c10::GetAllocator(kType)->allocate(size_bytes);
  const auto common = std::min(size_bytes, impl->nbytes());
  if (common && impl->data()) {
    auto &queue = queue_of(current_stream(current_device));
    queue.put([to = real_address(made.get()), from = real_address(impl->data()), common] {
      std::memcpy(to, from, common);
    });
  }
  impl->set_data_ptr_noswap(std::move(made));  // the old block is freed after the copy: that is its stream's order
  impl->set_nbytes(size_bytes);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex index) const override {
    return memory_of(index).has_context;
  }
  DeviceIndex deviceCount() const override {
    return kDevices;
  }
  void setCurrentDevice(DeviceIndex index) const override {
    enter(index);
    current_device = index;
  }
  DeviceIndex getCurrentDevice() const override {
    return current_device;
  }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return index < 0 ? current_device : std::exchange(current_device, index);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  bool isPinnedPtr(const void* pointer) const override {
    return PinnedAllocator::get().is_pinned(pointer);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &PinnedAllocator::get();
  }
  Device getDeviceFromPtr(void* pointer) const override {
    for (DeviceIndex index = 0; index < kDevices; ++index)
      if (memory_of(index).owns(pointer)) return Device(kType, index);
    TORCH_CHECK(false, "this is no memory of the stand-in accelerator");
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return memory_of(index < 0 ? current_device : index).generator;
  }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size_bytes) const override {
    resize_storage(storage, size_bytes);
  }
};

void check_dense(std::optional<c10::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      c10::layout_or_default(layout) == c10::Layout::Strided, "the stand-in accelerator has dense tensors only");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "only memory of the host can be pinned");
}

Tensor empty(
    c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<c10::Layout> layout,
    std::optional<Device> device, std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  check_dense(layout, pin_memory);
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(
      sizes, c10::GetAllocator(kType), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> dtype,
    std::optional<c10::Layout> layout, std::optional<Device> device, std::optional<bool> pin_memory) {
  check_dense(layout, pin_memory);
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(
      sizes, strides, c10::GetAllocator(kType), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != sizes) {
    const auto offset = size_t(self.storage_offset());
    const auto size_bytes = at::detail::computeStorageNbytesContiguous(sizes, self.itemsize(), offset);
    if (size_bytes > self.storage().nbytes()) resize_storage(self.storage(), size_bytes);
    impl->set_sizes_contiguous(sizes);
  }
  if (format) impl->empty_tensor_restride(*format);
  return self;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  if (self.sizes() != target.sizes()) resize_(target, self.sizes(), std::nullopt);
  return copy_from(self, target, false);
}

Tensor as_strided(
    const Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

Tensor& set_to_nothing(Tensor& self) {
  auto made = at::empty({0}, self.options());
  return at::native::set_tensor_(self, made);
}

Tensor& set_storage(
    Tensor& self, c10::Storage storage, int64_t offset, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  TORCH_CHECK(storage.device() == self.device(), "a tensor on ", self.device(), " cannot have memory elsewhere");
  auto* impl = self.unsafeGetTensorImpl();
  const auto dense = strides.data() ? c10::DimVector(strides) : c10::contiguous_strides(sizes);
  const auto size_bytes = at::detail::computeStorageNbytes(sizes, dense, self.itemsize(), size_t(offset));
  if (size_bytes > storage.nbytes()) resize_storage(storage, size_bytes);
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(sizes, dense, offset);
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage storage) {
  const auto size = int64_t(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {size}, {1});
}

at::Scalar item(const Tensor& self) {
  return self.cpu().item();
}

void record_stream(Tensor& self, Stream stream) {
  static_cast<c10::DeviceAllocator*>(c10::GetAllocator(kType))->recordStream(self.storage().data_ptr(), stream);
}

// A kernel: an operator on the numbers where they lie, in its turn. For operators that change their first argument.
void launch(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto num_arguments = op.schema().arguments().size();
  const Tensor self = torch::jit::peek(*stack, 0, num_arguments).toTensor();
  torch::jit::Stack given;
  for (const auto& argument : torch::jit::last(*stack, num_arguments)) {
    if (!argument.isTensor() || !argument.toTensor().defined()) {
      given.push_back(argument);
      continue;
    }
    const auto& tensor = argument.toTensor();
    TORCH_CHECK(
        tensor.device() == self.device() || (tensor.is_cpu() && tensor.dim() == 0), op.schema().name(),
        ": expected all tensors to be on the same device, but found ", self.device(), " and ", tensor.device());
    given.push_back(tensor.is_cpu() ? tensor.detach().clone() : on_host(tensor));
  }
  queue_of(self).put([op, given]() mutable { op.callBoxed(given); });
  torch::jit::drop(*stack, num_arguments);
  torch::jit::push(*stack, self);
}

// On the host, through copies. Random numbers are those of the device, unless somebody wants the host's.
void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto generator_type = c10::OptionalType::create(c10::GeneratorType::get());
  const auto is_on_device = [](const c10::IValue& value) {
    return value.isTensor() && value.toTensor().is_privateuseone();
  };
  std::optional<DeviceIndex> index;
  for (const auto& value : torch::jit::last(*stack, arguments.size()))
    if (is_on_device(value) && !index) index = value.toTensor().device().index();
  for (size_t at = 0; index && !draws_from_host && at < arguments.size(); ++at) {
    auto& value = torch::jit::peek(*stack, at, arguments.size());
    if (value.isNone() && *arguments[at].type() == *generator_type) value = memory_of(*index).generator;
  }
  const c10::OptionalDeviceGuard guard(index ? std::optional(Device(kType, *index)) : std::nullopt);
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

// Torch asks each backend for these, and has no way back to the host.
Tensor convolution(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups) {
  const auto host_bias = bias && bias->defined() ? std::optional(bias->cpu()) : std::nullopt;
  return at::convolution(
             input.cpu(), weight.cpu(), host_bias, stride, padding, dilation, transposed, output_padding, groups)
      .to(input.device());
}
std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> mask) {
  const auto bias_sizes = at::OptionalIntArrayRef(gradient.sizes().slice(1, 1));
  const auto [of_input, of_weight, of_bias] = at::convolution_backward(
      gradient.cpu(), input.cpu(), weight.cpu(), bias_sizes, stride, padding, dilation, transposed, output_padding,
      groups, mask);
  const auto back = [&](const Tensor& made) { return made.defined() ? made.to(input.device()) : made; };
  return {back(of_input), back(of_weight), back(of_bias)};
}

void sleep_on(int64_t device, double seconds) {
  queue_of(current_stream(DeviceIndex(device))).put([seconds] {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  });
}

std::map<int64_t, MarkPtr>& gates() {
  static auto* it = new std::map<int64_t, MarkPtr>;
  return *it;
}
int64_t put_gate(int64_t device) {
  auto made = std::make_shared<Mark>();
  int64_t number = 0;
  {
    static int64_t last = 0;
    Lock lock(shared().mutex);
    gates()[number = ++last] = made;
  }
  queue_of(current_stream(DeviceIndex(device))).wait_for(made);
  return number;
}
void open_gate(int64_t number) {
  MarkPtr found;
  {
    Lock lock(shared().mutex);
    if (auto known = gates().find(number); known != gates().end()) {
      found = known->second;
      gates().erase(known);
    }
  }
  if (found) found->finish();
}

void set_limit(int64_t device, int64_t size_bytes) {
  auto& memory = memory_of(DeviceIndex(device));
  Lock lock(shared().mutex);
  memory.limit = size_t(size_bytes);
}

void forget_contexts() {
  for (DeviceIndex index = 0; index < kDevices; ++index) memory_of(index).has_context = false;
}

Tensor random_state(int64_t device) {
  auto& generator = memory_of(DeviceIndex(device)).generator;
  Lock lock(generator.mutex());
  return generator.get_state();
}
void set_random_state(int64_t device, const Tensor& state) {
  auto& generator = memory_of(DeviceIndex(device)).generator;
  Lock lock(generator.mutex());
  generator.set_state(state);
}
void seed(int64_t device, int64_t value) {
  auto& generator = memory_of(DeviceIndex(device)).generator;
  Lock lock(generator.mutex());
  generator.set_current_seed(uint64_t(value));
}

Allocator allocator;
REGISTER_ALLOCATOR(kType, &allocator);
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
[[maybe_unused]] const bool is_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  at::setHostAllocator(kType, &PinnedAllocator::get());
  return true;
}();

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("record_stream", record_stream);
  m.impl("resize_", resize_);
  m.impl("set_", set_to_nothing);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("as_strided", as_strided);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view", at::native::view);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("view_as_real", at::native::view_as_real);
  for (auto* name :
       {"add_.Tensor", "addcdiv_", "addcmul_", "div_.Tensor", "fill_.Scalar", "fill_.Tensor", "lerp_.Scalar",
        "mul_.Tensor", "neg_", "sub_.Tensor", "zero_"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&launch>());
  }
}

// A copy sees to conjugates and opposites itself: torch would make a copy first, by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY(standin, m) {
  m.def("copy_delay(float seconds) -> ()", [](double seconds) { copy_delay_us = int64_t(seconds * 1e6); });
  m.def("sleep(int device, float seconds) -> ()", sleep_on);
  m.def("put_gate(int device) -> int", put_gate);
  m.def("open_gate(int number) -> ()", open_gate);
  m.def("set_limit(int device, int size_bytes) -> ()", set_limit);
  m.def("pinned_bytes() -> int", [] { return int64_t(PinnedAllocator::get().pinned_bytes()); });
  m.def("draw_from_host(bool value) -> ()", [](bool value) { draws_from_host = value; });
  m.def("has_context(int device) -> bool", [](int64_t index) { return memory_of(DeviceIndex(index)).has_context; });
  m.def("forget_contexts() -> ()", forget_contexts);
  m.def("is_forked() -> bool", [] { return is_forked.load(); });
  m.def("random_state(int device) -> Tensor", random_state);
  m.def("set_random_state(int device, Tensor state) -> ()", set_random_state);
  m.def("seed(int device, int value) -> ()", seed);
}
