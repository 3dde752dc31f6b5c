// What this process really takes, for tests of budgets.
#ifndef HVD_CTR_TESTS_CPP_PROCESS_MEMORY_H_
#define HVD_CTR_TESTS_CPP_PROCESS_MEMORY_H_

#include <unistd.h>

#include <cstdint>
#include <fstream>

namespace hvd_ctr {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kMemoryIsPlain = false;  // Sanitizers take memory and address space of their own.
#else
constexpr bool kMemoryIsPlain = true;
#endif

inline int64_t ResidentBytes() {
  int64_t all = 0;
  int64_t resident = 0;
  std::ifstream("/proc/self/statm") >> all >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

}  // namespace hvd_ctr

#endif  // HVD_CTR_TESTS_CPP_PROCESS_MEMORY_H_
