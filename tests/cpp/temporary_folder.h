// A folder for the files of a test program, removed at its end; and a way to break a file that the program has open.
#ifndef HVD_CTR_TESTS_CPP_TEMPORARY_FOLDER_H_
#define HVD_CTR_TESTS_CPP_TEMPORARY_FOLDER_H_

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>

namespace hvd_ctr {

inline const std::string& TestFolder() {
  struct Folder {
    Folder() {
      const char* parent = std::getenv("TMPDIR");
      path = std::string(parent != nullptr ? parent : "/tmp") + "/hvd_ctr_test_XXXXXX";
      EXPECT_NE(mkdtemp(path.data()), nullptr) << path;
    }
    ~Folder() {
      std::error_code ignored;
      std::filesystem::remove_all(path, ignored);
    }
    std::string path;
  };
  static const Folder folder;
  return folder.path;
}

/// From now on each read of this file by the descriptors that the program holds fails with EBADF.
inline void BreakReads(const std::string& path) {
  int broken = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    if (std::filesystem::read_symlink(entry.path(), error) != path) continue;
    const int fd = std::stoi(entry.path().filename().string());
    const int write_only = open(path.c_str(), O_WRONLY);
    ASSERT_GE(write_only, 0);
    ASSERT_EQ(dup2(write_only, fd), fd);
    close(write_only);
    ++broken;
    break;
  }
  ASSERT_EQ(broken, 1) << path;
}

}  // namespace hvd_ctr

#endif  // HVD_CTR_TESTS_CPP_TEMPORARY_FOLDER_H_
