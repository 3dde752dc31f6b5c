// AlignedBlock: one block of raw memory for tables that are read at random. Blocks of 2 MB and more are aligned to 2 MB and ask
// for huge pages, which makes random access to large tables about 1.7 times faster. Blocks of 128 KB and more are mapped for
// themselves, so that their memory goes back to the system when they are freed. Allocation failure is a return value, no
// exception. ReserveHuge and AssignHuge get huge pages for a std::vector.
//
//   AlignedBlock block;
//   if (!block.Allocate(bytes)) return MakeStatus(StatusCode::kResourceExhausted, ...);
#ifndef HVD_CTR_CORE_ALIGNED_BLOCK_H_
#define HVD_CTR_CORE_ALIGNED_BLOCK_H_

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <utility>
#include <vector>

namespace hvd_ctr {

class AlignedBlock {
 public:
  AlignedBlock() = default;
  AlignedBlock(AlignedBlock&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)),
        mapped_(std::exchange(other.mapped_, false)) {}
  AlignedBlock& operator=(AlignedBlock&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(mapped_, other.mapped_);
    return *this;
  }
  ~AlignedBlock() { Free(); }

  /// Replaces the content by `bytes` (> 0) uninitialised bytes. False: no memory; the old content is gone.
  bool Allocate(int64_t bytes) {
    Free();
    if (bytes < kMapped) return Hold(AllocateSmall(bytes), bytes, false);
    return Hold(bytes >= kHugePage ? MapHuge(bytes) : MapPages(bytes), bytes, true);
  }

  /// The same, but zeros, mapped and aligned to a page whatever the size.
  bool AllocatePages(int64_t bytes) {
    Free();
    return Hold(MapPages(bytes), bytes, true);
  }

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kHugePage = int64_t{2} << 20;
  static constexpr int64_t kMapped = int64_t{128} << 10;
  static constexpr int64_t kCacheLine = 64;

  bool Hold(void* data, int64_t bytes, bool mapped) {
    data_ = data;
    bytes_ = data == nullptr ? 0 : bytes;
    mapped_ = data != nullptr && mapped;
    return data != nullptr;
  }

  static void* AllocateSmall(int64_t bytes) {
    void* data = nullptr;
    return posix_memalign(&data, kCacheLine, static_cast<size_t>(bytes)) == 0 ? data : nullptr;
  }

  static void* MapPages(int64_t bytes) {
    void* map =
        mmap(nullptr, static_cast<size_t>(MappedBytes(bytes)), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return map == MAP_FAILED ? nullptr : map;
  }

  // Mapped here instead of by malloc, whose aligned blocks keep up to 2 MB of address space in front of them.
  static void* MapHuge(int64_t bytes) {
    const int64_t mapped = bytes + kHugePage;
    void* map = mmap(nullptr, static_cast<size_t>(mapped), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) return nullptr;
    auto* begin = static_cast<char*>(map);
    const auto head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(map) & static_cast<uintptr_t>(kHugePage - 1));
    const int64_t end = head + MappedBytes(bytes);
    if (head > 0) munmap(begin, static_cast<size_t>(head));
    if (end < mapped) munmap(begin + end, static_cast<size_t>(mapped - end));
    // Advice only: without huge pages everything works, but slower.
    (void)madvise(begin + head, static_cast<size_t>(bytes), MADV_HUGEPAGE);
    return begin + head;
  }

  // Whole pages, as mapped.
  static int64_t MappedBytes(int64_t bytes) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    return (bytes + page - 1) / page * page;
  }

  void Free() {
    if (mapped_) {
      munmap(data_, static_cast<size_t>(MappedBytes(bytes_)));
    } else {
      std::free(data_);
    }
    Hold(nullptr, 0, false);
  }

  void* data_ = nullptr;
  int64_t bytes_ = 0;
  bool mapped_ = false;
};

/// Makes room for `count` elements in all and asks for huge pages, where they are not touched yet. Throws std::bad_alloc.
template <typename T>
void ReserveHuge(size_t count, std::vector<T>* values) {
  if (values->capacity() >= count) return;
  values->reserve(count);
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  const auto begin = (reinterpret_cast<uintptr_t>(values->data()) + kHugePage - 1) / kHugePage * kHugePage;
  const auto end = reinterpret_cast<uintptr_t>(values->data() + values->capacity()) / kHugePage * kHugePage;
  // Advice only, and only for whole huge pages within.
  if (begin < end) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

/// `count` elements of this value, in huge pages where they take some.
template <typename T>
void AssignHuge(size_t count, const T& value, std::vector<T>* values) {
  ReserveHuge(count, values);
  values->assign(count, value);
}

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_ALIGNED_BLOCK_H_
