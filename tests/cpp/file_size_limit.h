// FileSizeLimit: while it lives, this process cannot write files beyond a size, as if the disk were full.
#ifndef HVD_CTR_TESTS_CPP_FILE_SIZE_LIMIT_H_
#define HVD_CTR_TESTS_CPP_FILE_SIZE_LIMIT_H_

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <cstdint>

namespace hvd_ctr {

class FileSizeLimit {
 public:
  explicit FileSizeLimit(int64_t bytes) : old_handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    EXPECT_EQ(getrlimit(RLIMIT_FSIZE, &old_), 0);
    rlimit limit = old_;
    limit.rlim_cur = static_cast<rlim_t>(bytes);
    EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &old_);
    std::signal(SIGXFSZ, old_handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit old_;
  void (*old_handler_)(int);
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_TESTS_CPP_FILE_SIZE_LIMIT_H_
