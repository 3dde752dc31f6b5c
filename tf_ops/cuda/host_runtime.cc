#include "tf_ops/cuda/host_runtime.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>

namespace hvd_ctr {
namespace {

using Clock = std::chrono::steady_clock;

int64_t MachineBytes() { return static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE); }

void Copy(void* to, const void* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
}

}  // namespace

Status HostRuntime::Allocate(int64_t bytes, void** memory) const {
  const int64_t most = MachineBytes();
  *memory = nullptr;
  if (bytes < 0) return MakeStatus(StatusCode::kInvalidArgument, "Allocate of ", bytes, " bytes");
  if (bytes <= most) {
    const size_t rounded = (static_cast<size_t>(std::max<int64_t>(bytes, 1)) + kDeviceAlignment - 1) / kDeviceAlignment;
    *memory = std::aligned_alloc(kDeviceAlignment, rounded * kDeviceAlignment);
  }
  if (*memory != nullptr) return Status::Ok();
  return MakeStatus(StatusCode::kResourceExhausted, "Allocate of ", bytes, " bytes: this machine has ", most, " bytes in all");
}

void HostRuntime::Free(void* memory) const { std::free(memory); }

Status HostRuntime::CopyToDevice(void* to, const void* from, int64_t bytes, Stream /*stream*/) const {
  Copy(to, from, bytes);
  return Status::Ok();
}

Status HostRuntime::CopyToHost(void* to, const void* from, int64_t bytes, Stream /*stream*/) const {
  Copy(to, from, bytes);
  return Status::Ok();
}

Status HostRuntime::CopyOnDevice(void* to, const void* from, int64_t bytes, Stream /*stream*/) const {
  Copy(to, from, bytes);
  return Status::Ok();
}

Status HostRuntime::Zero(void* memory, int64_t bytes, Stream /*stream*/) const {
  if (bytes > 0) std::memset(memory, 0, static_cast<size_t>(bytes));
  return Status::Ok();
}

Status HostRuntime::NewStream(Stream* stream) const {
  *stream = nullptr;
  return Status::Ok();
}

void HostRuntime::DestroyStream(Stream /*stream*/) const {}

Status HostRuntime::NewEvent(Event* event, bool timed) const {
  event->handle = timed ? new Clock::time_point() : nullptr;
  return Status::Ok();
}

void HostRuntime::DestroyEvent(Event event) const { delete static_cast<Clock::time_point*>(event.handle); }

Status HostRuntime::Record(Event event, Stream /*stream*/) const {
  if (event.handle != nullptr) *static_cast<Clock::time_point*>(event.handle) = Clock::now();
  return Status::Ok();
}

Status HostRuntime::Wait(Stream /*stream*/, Event /*event*/) const { return Status::Ok(); }

Status HostRuntime::Synchronize(Stream /*stream*/) const { return Status::Ok(); }

Status HostRuntime::Synchronize(Event /*event*/) const { return Status::Ok(); }

Status HostRuntime::Elapsed(Event from, Event to, double* seconds) const {
  if (from.handle == nullptr || to.handle == nullptr) {
    return MakeStatus(StatusCode::kInvalidArgument, "Elapsed of events that are not timed");
  }
  *seconds =
      std::chrono::duration<double>(*static_cast<Clock::time_point*>(to.handle) - *static_cast<Clock::time_point*>(from.handle))
          .count();
  return Status::Ok();
}

Status HostRuntime::Describe(std::string* text) const {
  *text = internal::StrCat("this machine, ", MachineBytes() >> 30, " GiB");
  return Status::Ok();
}

Status HostRuntime::CheckGeometry(const char* name, const Geometry& geometry) {
  if (geometry.blocks >= 0 && geometry.threads >= 0 && geometry.threads <= kBlockThreads) return Status::Ok();
  return MakeStatus(StatusCode::kInvalidArgument, "Launch of ", name, " with ", geometry.blocks, " blocks of ", geometry.threads,
                    " threads; allowed are blocks >= 0 and 0 .. ", kBlockThreads, " threads");
}

}  // namespace hvd_ctr
