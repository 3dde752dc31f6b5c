// UringQueue: reads of one process through io_uring, by raw system calls. One thread at a time.
//
//   std::unique_ptr<UringQueue> queue = UringQueue::Open(256);     // null: this kernel does not allow it
//   queue->Push(fd, buffer, bytes, offset, tag);                   // at most `depth` pushed and not yet popped
//   queue->Submit(wait_for);                                       // 0: do not wait
//   while (queue->Pop(&tag, &result)) ...                          // bytes read, or -errno
#ifndef HVD_CTR_CORE_URING_QUEUE_H_
#define HVD_CTR_CORE_URING_QUEUE_H_

#include <cstdint>
#include <memory>

namespace hvd_ctr {

class UringQueue {
 public:
  /// Null where the kernel has no io_uring, forbids it, or cannot read with it.
  static std::unique_ptr<UringQueue> Open(uint32_t depth);
  ~UringQueue();
  UringQueue(const UringQueue&) = delete;
  UringQueue& operator=(const UringQueue&) = delete;

  void Push(int fd, void* buffer, uint32_t bytes, int64_t offset, uint64_t tag);
  /// Hands what was pushed to the kernel and waits until at least `wait_for` reads are done. 0, or errno.
  int Submit(uint32_t wait_for);
  bool Pop(uint64_t* tag, int32_t* result);

 private:
  UringQueue() = default;
  bool Map(uint32_t depth);

  int fd_ = -1;
  void* ring_ = nullptr;  // Both rings, one mapping.
  uint64_t ring_bytes_ = 0;
  void* entries_ = nullptr;
  uint64_t entries_bytes_ = 0;
  uint32_t* sq_tail_ = nullptr;
  uint32_t* cq_head_ = nullptr;
  uint32_t* cq_tail_ = nullptr;
  void* completions_ = nullptr;
  uint32_t sq_mask_ = 0;
  uint32_t cq_mask_ = 0;
  uint32_t pushed_ = 0;  // Not yet handed to the kernel.
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_URING_QUEUE_H_
