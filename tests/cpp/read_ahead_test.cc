// ReadAhead: what Take gives is what the file has, whatever was dropped, overwritten or wanted meanwhile.
#include "tf_ops/core/read_ahead.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "tests/cpp/temporary_folder.h"

namespace hvd_ctr {
namespace {

constexpr int64_t kFloats = 128;
constexpr int64_t kBytes = kFloats * int64_t{sizeof(float)};
constexpr int64_t kRows = 300;

class ReadAheadTest : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    RecordFile::Options options;
    options.folder = TestFolder();
    options.name = "ahead.rows";
    options.direct = GetParam();
    Result<std::unique_ptr<RecordFile>> file = RecordFile::Open(options);
    ASSERT_TRUE(file.ok()) << file.status().message();
    file_ = std::move(file.value());
    ASSERT_TRUE(block_.AllocatePages(kRows * kBytes));
    for (int64_t row = 0; row < kRows; ++row) Fill(row, static_cast<float>(row));
    Flush();
  }

  void Fill(int64_t row, float value) {
    float* record = static_cast<float*>(block_.data()) + row * kFloats;
    for (int64_t i = 0; i < kFloats; ++i) record[i] = value + static_cast<float>(i) / 256.0f;
  }

  void Flush() {
    const Status written = file_->Write(block_.data(), kRows * kBytes, 0);
    ASSERT_TRUE(written.ok()) << written.message();
  }

  void Make(int64_t records) {
    ahead_ = std::make_unique<ReadAhead>(file_.get(), kBytes, file_->block_bytes(), records * (kBytes + 52), 64 << 10);
    const Status allocated = ahead_->Allocate(GetParam());
    ASSERT_TRUE(allocated.ok()) << allocated.message();
    EXPECT_EQ(ahead_->allocated_bytes(), ahead_->planned_bytes());
  }

  void Want(int64_t row) { ahead_->Want(static_cast<uint32_t>(row), row * kBytes); }

  /// Whether it was there; if so, with the file's content.
  bool Take(int64_t row) {
    std::vector<float> record(static_cast<size_t>(kFloats));
    if (!ahead_->Take(static_cast<uint32_t>(row), record.data())) return false;
    EXPECT_EQ(std::memcmp(record.data(), static_cast<char*>(block_.data()) + row * kBytes, static_cast<size_t>(kBytes)), 0)
        << row;
    return true;
  }

  std::unique_ptr<RecordFile> file_;
  AlignedBlock block_;
  std::unique_ptr<ReadAhead> ahead_;
};

TEST_P(ReadAheadTest, GivesWhatWasStartedOnce) {
  Make(64);
  for (const int64_t row : {7, 3, 299, 3}) Want(row);
  EXPECT_EQ(ahead_->wanted(), 3);
  ahead_->Start();
  ahead_->Wait();
  EXPECT_TRUE(Take(3));
  EXPECT_FALSE(Take(3));
  EXPECT_FALSE(Take(8));
  EXPECT_TRUE(Take(299));
  EXPECT_TRUE(Take(7));
  EXPECT_EQ(ahead_->wanted(), 0);
  EXPECT_EQ(ahead_->rows_read(), 3);
}

TEST_P(ReadAheadTest, WhatIsNotStartedOrDroppedIsNotThere) {
  Make(64);
  Want(1);
  EXPECT_FALSE(Take(1));  // Forgotten by this.
  Want(2);
  Want(5);
  ahead_->Drop(5);
  ahead_->Start();
  ahead_->Wait();
  EXPECT_FALSE(Take(1));
  EXPECT_FALSE(Take(5));
  EXPECT_TRUE(Take(2));
  EXPECT_EQ(ahead_->wanted(), 0);
}

TEST_P(ReadAheadTest, AFullPoolTakesNoMoreUntilWhatNobodyAskedForIsOld) {
  Make(4);
  for (int64_t row = 0; row < 6; ++row) Want(row);
  ahead_->Start();
  ahead_->Wait();
  EXPECT_EQ(ahead_->wanted(), 4);
  EXPECT_FALSE(Take(5));
  EXPECT_TRUE(Take(0));
  for (int i = 0; i < 200; ++i) ahead_->Start();
  for (int64_t row = 100; row < 104; ++row) Want(row);
  ahead_->Start();
  ahead_->Wait();
  for (int64_t row = 100; row < 104; ++row) EXPECT_TRUE(Take(row)) << row;
  for (int64_t row = 1; row < 4; ++row) EXPECT_FALSE(Take(row));
}

TEST_P(ReadAheadTest, ReadErrorsLeaveNothingBehind) {
  Make(16);
  ahead_->Want(1, kRows * kBytes * 10);  // Beyond the end.
  Want(2);
  ahead_->Start();
  ahead_->Wait();
  EXPECT_FALSE(Take(1));
  EXPECT_FALSE(Take(2));  // Of the same series of reads.
  EXPECT_EQ(ahead_->wanted(), 0);
  Want(3);
  ahead_->Start();
  ahead_->Wait();
  EXPECT_TRUE(Take(3));
}

// Rows are rewritten all the time; the owner drops a row before it does.
TEST_P(ReadAheadTest, RandomProgram) {
  Make(50);
  std::mt19937 random(5);
  int64_t taken = 0;
  for (int step = 0; step < 4000; ++step) {
    const auto row = static_cast<int64_t>(random() % kRows);
    switch (random() % 5) {
      case 0:
      case 1:
        Want(row);
        break;
      case 2:
        ahead_->Start();
        if (random() % 4 == 0) ahead_->Wait();
        break;
      case 3:
        taken += Take(row);
        break;
      default: {
        ahead_->Drop(static_cast<uint32_t>(row));
        Fill(row, static_cast<float>(step + 1000));
        const int64_t block = std::max(kBytes, file_->block_bytes());
        const int64_t begin = row * kBytes / block * block;
        const Status written =
            file_->Write(static_cast<char*>(block_.data()) + begin, std::min(block, kRows * kBytes - begin), begin);
        ASSERT_TRUE(written.ok()) << written.message();
      }
    }
  }
  EXPECT_GT(taken, 20);
}

INSTANTIATE_TEST_SUITE_P(Modes, ReadAheadTest, testing::Bool(),
                         [](const testing::TestParamInfo<bool>& info) { return info.param ? "Direct" : "PageCache"; });

}  // namespace
}  // namespace hvd_ctr
