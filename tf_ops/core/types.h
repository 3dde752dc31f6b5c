// Vocabulary types of the core: Span, Key, TaskRunner. Symbols (B N U W R K D S M E) are defined in README.md.
#ifndef HVD_CTR_CORE_TYPES_H_
#define HVD_CTR_CORE_TYPES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace hvd_ctr {

/// A view of n contiguous elements; does not own them. (C++17 has no std::span.)
template <typename T>
class Span {
 public:
  Span() = default;
  Span(T* data, int64_t size) : data_(data), size_(size) {}
  template <typename Container, typename = decltype(std::declval<Container&>().data())>
  Span(Container& c) : data_(c.data()), size_(static_cast<int64_t>(c.size())) {}  // NOLINT

  T* data() const { return data_; }
  int64_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T* begin() const { return data_; }
  T* end() const { return data_ + size_; }
  T& operator[](int64_t i) const { return data_[i]; }
  Span subspan(int64_t offset, int64_t count) const { return Span(data_ + offset, count); }

 private:
  T* data_ = nullptr;
  int64_t size_ = 0;
};

/// Names one row: `table` is the index in MixCacheOptions::tables, `id` any value 0 .. 2^63-1.
struct Key {
  int64_t id = 0;
  int32_t table = 0;

  friend bool operator==(const Key& a, const Key& b) { return a.id == b.id && a.table == b.table; }
  friend bool operator!=(const Key& a, const Key& b) { return !(a == b); }
};

/// Position of a cached row on the device, 0 .. S-1; kNoSlot marks a key that has none.
using Slot = int32_t;
constexpr Slot kNoSlot = -1;

/// Virtual id of an id that was dropped (padding, or invalid under the skip policy): pools to nothing, gets no gradient.
constexpr int32_t kNoVirtualId = -1;

/// The injected thread pool. Results of every core function are bit-identical for any number of threads.
class TaskRunner {
 public:
  virtual ~TaskRunner() = default;
  /// Number of threads that ParallelFor may use, >= 1.
  virtual int threads() const = 0;
  /// Calls fn(begin, end) over disjoint ranges that cover [0, n), each at least `grain` long (but for the last one), and
  /// returns when all are done. fn must not throw.
  virtual void ParallelFor(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& fn) = 0;
  /// Where the caller's device work is ordered (cudaStream_t); CPUs have none.
  virtual void* stream() const { return nullptr; }
  /// The same as ParallelFor without a copy of fn, for which std::function would allocate memory.
  template <typename Function>
  void Run(int64_t n, int64_t grain, const Function& fn) {
    ParallelFor(n, grain, std::cref(fn));
  }
};

/// Runs everything on the calling thread.
class InlineRunner final : public TaskRunner {
 public:
  int threads() const override { return 1; }
  void ParallelFor(int64_t n, int64_t /*grain*/, const std::function<void(int64_t, int64_t)>& fn) override {
    if (n > 0) fn(0, n);
  }
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_TYPES_H_
