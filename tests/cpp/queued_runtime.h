// QueuedRuntime: a runtime for tests that behaves as badly as a device may. Device memory cannot be touched by the host, nothing
// runs before somebody waits for it, and then no more runs than has to or, by a roll of dice, anything that may.
//
//   auto device = std::make_shared<QueuedDevice>(seed);
//   DeviceRows<QueuedRuntime> backend("QueuedBackend", QueuedRuntime(device));
//
// So a wait that is missing, staging memory that is filled again too early, a kernel that reads host memory and host code that
// reads device memory give wrong numbers or a fault. Blocks and threads of a launch run forwards or backwards.
#ifndef HVD_CTR_TESTS_CPP_QUEUED_RUNTIME_H_
#define HVD_CTR_TESTS_CPP_QUEUED_RUNTIME_H_

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tf_ops/core/status.h"
#include "tf_ops/cuda/kernel_geometry.h"
#include "tf_ops/cuda/runtime_types.h"

namespace hvd_ctr {

/// Memory of one kind: a reserved range that is accessible or not as a whole.
class MemoryRegion {
 public:
  explicit MemoryRegion(int protection) {
    base_ = static_cast<char*>(mmap(nullptr, kBytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (base_ == MAP_FAILED) std::abort();
  }
  MemoryRegion(const MemoryRegion&) = delete;
  MemoryRegion& operator=(const MemoryRegion&) = delete;
  ~MemoryRegion() { munmap(base_, kBytes); }

  bool Holds(const void* memory) const { return memory >= base_ && memory < base_ + kBytes; }
  void Protect(int protection) { mprotect(base_, kBytes, protection); }

  Status Allocate(int64_t bytes, void** memory) {
    *memory = nullptr;
    if (bytes < 0 || static_cast<uint64_t>(bytes) > kBytes - static_cast<uint64_t>(used_) - kDeviceAlignment) {
      return MakeStatus(StatusCode::kResourceExhausted, "Allocate of ", bytes, " bytes: ", used_, " of ", kBytes, " are used");
    }
    const int64_t rounded = (std::max<int64_t>(bytes, 1) + kDeviceAlignment - 1) / kDeviceAlignment * kDeviceAlignment;
    const auto freed = free_.find(rounded);
    if (freed != free_.end()) {
      *memory = freed->second;
      free_.erase(freed);
    } else {
      *memory = base_ + used_;
      used_ += rounded;
    }
    sizes_[*memory] = rounded;
    ++allocations_;
    return Status::Ok();
  }
  void Free(void* memory) {
    const auto found = sizes_.find(memory);
    if (found == sizes_.end()) {
      ADD_FAILURE() << "Free of memory that was not allocated";
      return;
    }
    free_.emplace(found->second, memory);
    sizes_.erase(found);
  }
  int64_t in_use() const { return static_cast<int64_t>(sizes_.size()); }
  int64_t allocations() const { return allocations_; }

 private:
  static constexpr size_t kBytes = size_t{1} << 36;

  char* base_ = nullptr;
  int64_t used_ = 0;
  int64_t allocations_ = 0;
  std::map<void*, int64_t> sizes_;
  std::multimap<int64_t, void*> free_;
};

class QueuedDevice {
 public:
  /// one_thread: pinned memory is out of the kernels' reach, which needs that nobody fills it while they run.
  explicit QueuedDevice(uint32_t seed, bool one_thread = true) : random_(seed), one_thread_(one_thread) {}
  ~QueuedDevice() {
    EXPECT_EQ(device_.in_use() + pinned_.in_use() + open_handles_, 0) << "memory, streams or events were not given back";
  }

  struct EventState {
    int64_t recorded = 0;
    int64_t done = 0;
  };
  struct Work {
    std::string name;
    std::function<void()> run;
    EventState* event = nullptr;  // To wait for, or, of a record, to mark as done.
    int64_t version = 0;
    bool waits = false;
  };

  /// From now on nothing runs that has not to.
  void StopDice() {
    std::lock_guard<std::mutex> lock(mutex_);
    dice_ = false;
  }
  /// Names of what has run, in order: kernels, "CopyToDevice" and so on.
  std::vector<std::string> ran() {
    std::lock_guard<std::mutex> lock(mutex_);
    return ran_;
  }
  int64_t allocations() {
    std::lock_guard<std::mutex> lock(mutex_);
    return device_.allocations() + pinned_.allocations();
  }

 private:
  friend class QueuedRuntime;

  bool Dice(uint32_t sides) { return dice_ && random_() % sides == 0; }
  void Enqueue(Stream stream, Work work) {
    queues_[stream].push_back(std::move(work));
    if (Dice(8)) RunSome();
  }
  bool RunFirst(Stream stream) {
    std::deque<Work>& queue = queues_[stream];
    if (queue.empty() || (queue.front().waits && queue.front().event->done < queue.front().version)) return false;
    const Work work = std::move(queue.front());
    queue.pop_front();
    if (work.run) {
      work.run();
      ran_.push_back(work.name);
    }
    if (work.event != nullptr && !work.waits) work.event->done = std::max(work.event->done, work.version);
    return true;
  }
  void RunSome() {
    for (auto& queue : queues_) {
      for (uint32_t n = static_cast<uint32_t>(random_() % 4); n > 0 && RunFirst(queue.first); --n) {
      }
    }
  }
  /// Runs the stream until `done`, and of other streams what it waits for.
  template <typename Done>
  void RunUntil(Stream stream, const Done& done) {
    while (!done()) {
      if (RunFirst(stream)) continue;
      std::deque<Work>& queue = queues_[stream];
      if (queue.empty()) {
        ADD_FAILURE() << "waiting for work that nobody has given to the stream";
        return;
      }
      RunEvent(queue.front().event, queue.front().version);
    }
  }
  void RunEvent(EventState* event, int64_t version) {
    if (event->done >= version) return;
    for (auto& queue : queues_) {
      for (const Work& work : queue.second) {
        // Not a later record: that may wait for this one itself.
        if (work.waits || work.event != event || work.version != version) continue;
        RunUntil(queue.first, [&] { return event->done >= version; });
        return;
      }
    }
    ADD_FAILURE() << "an event that is waited for was never recorded";
    event->done = version;
  }
  void RunAll() {
    for (auto& queue : queues_) {
      RunUntil(queue.first, [&] { return queue.second.empty(); });
    }
  }
  template <typename Function>
  void OnDevice(const Function& function) {
    device_.Protect(PROT_READ | PROT_WRITE);
    function();
    device_.Protect(PROT_NONE);
  }

  std::mutex mutex_;
  std::mt19937 random_;
  const bool one_thread_;
  bool dice_ = true;
  MemoryRegion device_{PROT_NONE};
  MemoryRegion pinned_{PROT_READ | PROT_WRITE};
  std::map<Stream, std::deque<Work>> queues_;
  std::vector<std::string> ran_;
  int64_t open_handles_ = 0;
};

class QueuedRuntime {
 public:
  explicit QueuedRuntime(std::shared_ptr<QueuedDevice> device) : device_(std::move(device)) {}

  Status Bind() { return Status::Ok(); }
  Status Use() const { return Status::Ok(); }
  Status Allocate(int64_t bytes, void** memory) const {
    const Lock lock(device_->mutex_);
    return device_->device_.Allocate(bytes, memory);
  }
  void Free(void* memory) const {
    const Lock lock(device_->mutex_);
    if (memory == nullptr) return;
    device_->RunAll();
    device_->device_.Free(memory);
  }
  Status AllocatePinned(int64_t bytes, void** memory) const {
    const Lock lock(device_->mutex_);
    return device_->pinned_.Allocate(bytes, memory);
  }
  void FreePinned(void* memory) const {
    const Lock lock(device_->mutex_);
    if (memory == nullptr) return;
    device_->RunAll();
    device_->pinned_.Free(memory);
  }

  /// From memory that is not pinned the bytes are taken at once, as CUDA does.
  Status CopyToDevice(void* to, const void* from, int64_t bytes, Stream stream) const {
    const Lock lock(device_->mutex_);
    EXPECT_TRUE(device_->device_.Holds(to) && !device_->device_.Holds(from));
    if (device_->pinned_.Holds(from)) return Copy("CopyToDevice", to, from, bytes, stream);
    const auto* const begin = static_cast<const char*>(from);
    const std::vector<char> taken(begin, begin + bytes);
    return Put(stream, "CopyToDevice", [to, taken] { std::memcpy(to, taken.data(), taken.size()); });
  }
  Status CopyToHost(void* to, const void* from, int64_t bytes, Stream stream) const {
    const Lock lock(device_->mutex_);
    EXPECT_TRUE(device_->device_.Holds(from) && !device_->device_.Holds(to));
    return Copy("CopyToHost", to, from, bytes, stream);
  }
  Status CopyOnDevice(void* to, const void* from, int64_t bytes, Stream stream) const {
    const Lock lock(device_->mutex_);
    EXPECT_TRUE(device_->device_.Holds(from) && device_->device_.Holds(to));
    return Copy("CopyOnDevice", to, from, bytes, stream);
  }
  Status Zero(void* memory, int64_t bytes, Stream stream) const {
    const Lock lock(device_->mutex_);
    EXPECT_TRUE(device_->device_.Holds(memory));
    return Put(stream, "Zero", [memory, bytes] { std::memset(memory, 0, static_cast<size_t>(bytes)); });
  }

  Status NewStream(Stream* stream) const {
    const Lock lock(device_->mutex_);
    ++device_->open_handles_;
    *stream = new char;
    return Status::Ok();
  }
  void DestroyStream(Stream stream) const {
    const Lock lock(device_->mutex_);
    if (stream == nullptr) return;
    device_->RunAll();
    device_->queues_.erase(stream);
    --device_->open_handles_;
    delete static_cast<char*>(stream);
  }
  Status NewEvent(Event* event, bool /*timed*/ = false) const {
    const Lock lock(device_->mutex_);
    ++device_->open_handles_;
    event->handle = new QueuedDevice::EventState;
    return Status::Ok();
  }
  void DestroyEvent(Event event) const {
    const Lock lock(device_->mutex_);
    if (event.handle == nullptr) return;
    device_->RunAll();
    --device_->open_handles_;
    delete State(event);
  }
  Status Record(Event event, Stream stream) const {
    const Lock lock(device_->mutex_);
    device_->Enqueue(stream, {"Record", nullptr, State(event), ++State(event)->recorded, false});
    return Status::Ok();
  }
  /// For what has been recorded by now: nothing where nothing has.
  Status Wait(Stream stream, Event event) const {
    const Lock lock(device_->mutex_);
    device_->Enqueue(stream, {"Wait", nullptr, State(event), State(event)->recorded, true});
    return Status::Ok();
  }
  Status Synchronize(Stream stream) const {
    const Lock lock(device_->mutex_);
    if (device_->Dice(4)) device_->RunSome();
    device_->RunUntil(stream, [&] { return device_->queues_[stream].empty(); });
    return Status::Ok();
  }
  Status Synchronize(Event event) const {
    const Lock lock(device_->mutex_);
    if (device_->Dice(4)) device_->RunSome();
    device_->RunEvent(State(event), State(event)->recorded);
    return Status::Ok();
  }

  template <typename Kernel>
  Status Launch(const char* name, const Geometry& geometry, const Kernel& kernel, Stream stream) const {
    const Lock lock(device_->mutex_);
    if (geometry.blocks == 0) return Status::Ok();
    QueuedDevice* const device = device_.get();
    const bool backwards = device->random_() % 2 == 0;
    device->Enqueue(stream, {name, [=] { Run(device, geometry, kernel, backwards); }});
    return Status::Ok();
  }

 private:
  using Lock = std::lock_guard<std::mutex>;

  static QueuedDevice::EventState* State(Event event) { return static_cast<QueuedDevice::EventState*>(event.handle); }

  template <typename Kernel>
  static void Run(QueuedDevice* device, const Geometry& geometry, const Kernel& kernel, bool backwards) {
    if (device->one_thread_) device->pinned_.Protect(PROT_NONE);
    device->OnDevice([&] {
      for (int64_t b = 0; b < geometry.blocks; ++b) {
        for (int32_t t = 0; t < geometry.threads; ++t) {
          kernel(backwards ? geometry.blocks - 1 - b : b, backwards ? geometry.threads - 1 - t : t);
        }
      }
    });
    if (device->one_thread_) device->pinned_.Protect(PROT_READ | PROT_WRITE);
  }

  template <typename Function>
  Status Put(Stream stream, const char* name, const Function& function) const {
    QueuedDevice* const device = device_.get();
    device->Enqueue(stream, {name, [device, function] { device->OnDevice(function); }});
    return Status::Ok();
  }
  Status Copy(const char* name, void* to, const void* from, int64_t bytes, Stream stream) const {
    return Put(stream, name, [to, from, bytes] { std::memcpy(to, from, static_cast<size_t>(bytes)); });
  }

  std::shared_ptr<QueuedDevice> device_;
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_TESTS_CPP_QUEUED_RUNTIME_H_
