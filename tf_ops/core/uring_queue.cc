#include "tf_ops/core/uring_queue.h"

#if defined(__linux__) && defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/syscall.h>
#if defined(__NR_io_uring_setup) && defined(IORING_FEAT_RW_CUR_POS)
#define HVD_CTR_HAS_URING 1
#endif
#endif
#endif

#if defined(HVD_CTR_HAS_URING)

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace hvd_ctr {
namespace {

uint32_t* Word(void* ring, uint32_t offset) { return reinterpret_cast<uint32_t*>(static_cast<char*>(ring) + offset); }

}  // namespace

std::unique_ptr<UringQueue> UringQueue::Open(uint32_t depth) {
  std::unique_ptr<UringQueue> queue(new UringQueue());
  if (!queue->Map(depth)) return nullptr;
  return queue;
}

bool UringQueue::Map(uint32_t depth) {
  io_uring_params params;
  std::memset(&params, 0, sizeof(params));
  fd_ = static_cast<int>(syscall(__NR_io_uring_setup, depth, &params));
  if (fd_ < 0) return false;
  // IORING_OP_READ came with RW_CUR_POS (Linux 5.6).
  if ((params.features & IORING_FEAT_SINGLE_MMAP) == 0 || (params.features & IORING_FEAT_RW_CUR_POS) == 0) return false;
  const uint64_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(uint32_t);
  const uint64_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
  ring_bytes_ = sq_bytes > cq_bytes ? sq_bytes : cq_bytes;
  void* ring = mmap(nullptr, ring_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, IORING_OFF_SQ_RING);
  if (ring == MAP_FAILED) return false;
  ring_ = ring;
  entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
  void* entries = mmap(nullptr, entries_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, IORING_OFF_SQES);
  if (entries == MAP_FAILED) return false;
  entries_ = entries;
  sq_tail_ = Word(ring_, params.sq_off.tail);
  cq_head_ = Word(ring_, params.cq_off.head);
  cq_tail_ = Word(ring_, params.cq_off.tail);
  sq_mask_ = *Word(ring_, params.sq_off.ring_mask);
  cq_mask_ = *Word(ring_, params.cq_off.ring_mask);
  completions_ = static_cast<char*>(ring_) + params.cq_off.cqes;
  // Entry i is always described by element i.
  uint32_t* array = Word(ring_, params.sq_off.array);
  for (uint32_t i = 0; i < params.sq_entries; ++i) array[i] = i;
  return true;
}

UringQueue::~UringQueue() {
  if (entries_ != nullptr) munmap(entries_, entries_bytes_);
  if (ring_ != nullptr) munmap(ring_, ring_bytes_);
  if (fd_ >= 0) close(fd_);
}

void UringQueue::Push(int fd, void* buffer, uint32_t bytes, int64_t offset, uint64_t tag) {
  const uint32_t tail = *sq_tail_;
  io_uring_sqe* entry = static_cast<io_uring_sqe*>(entries_) + (tail & sq_mask_);
  std::memset(entry, 0, sizeof(*entry));
  entry->opcode = IORING_OP_READ;
  entry->fd = fd;
  entry->off = static_cast<uint64_t>(offset);
  entry->addr = reinterpret_cast<uint64_t>(buffer);
  entry->len = bytes;
  entry->user_data = tag;
  __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
  ++pushed_;
}

int UringQueue::Submit(uint32_t wait_for) {
  while (true) {
    const long taken =
        syscall(__NR_io_uring_enter, fd_, pushed_, wait_for, wait_for > 0 ? IORING_ENTER_GETEVENTS : 0, nullptr, 0);
    if (taken >= 0) {
      pushed_ -= static_cast<uint32_t>(taken);
      if (pushed_ == 0) return 0;
    } else if (errno != EINTR && errno != EAGAIN && errno != EBUSY) {
      return errno;
    }
  }
}

bool UringQueue::Pop(uint64_t* tag, int32_t* result) {
  const uint32_t head = *cq_head_;
  if (head == __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE)) return false;
  const io_uring_cqe& completion = static_cast<const io_uring_cqe*>(completions_)[head & cq_mask_];
  *tag = completion.user_data;
  *result = completion.res;
  __atomic_store_n(cq_head_, head + 1, __ATOMIC_RELEASE);
  return true;
}

}  // namespace hvd_ctr

#else  // No io_uring in the headers of this system.

namespace hvd_ctr {

std::unique_ptr<UringQueue> UringQueue::Open(uint32_t /*depth*/) { return nullptr; }
UringQueue::~UringQueue() = default;
bool UringQueue::Map(uint32_t /*depth*/) { return false; }
void UringQueue::Push(int /*fd*/, void* /*buffer*/, uint32_t /*bytes*/, int64_t /*offset*/, uint64_t /*tag*/) {}
int UringQueue::Submit(uint32_t /*wait_for*/) { return 0; }
bool UringQueue::Pop(uint64_t* /*tag*/, int32_t* /*result*/) { return false; }

}  // namespace hvd_ctr

#endif
