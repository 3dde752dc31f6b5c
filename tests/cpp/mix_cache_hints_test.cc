// MixCache: Announce, SetFrequencies, WarmStart.
#include <atomic>
#include <thread>

#include "tests/cpp/mix_cache_fixture.h"

namespace hvd_ctr {
namespace {

class HintsTest : public testing::Test {
 protected:
  void Make(EvictionPolicyKind policy, int64_t slots, int32_t window = 8) {
    options_ = CacheOptions(slots, {Table("a", OptimizerKind::kAdagrad), Table("b")});
    options_.policy = policy;
    options_.window = window;
    cache_ = MakeCache(options_);
  }

  bool Announce(const ReceivedKeys& received) {
    bool noted = false;
    EXPECT_OK(cache_->Announce(received, &noted));
    return noted;
  }

  void Train(const ReceivedKeys& received) {
    int64_t ticket = 0;
    ASSERT_OK(cache_->Prefetch(received, &ticket, &runner_));
    const std::vector<float> gradients(received.ids.size() * static_cast<size_t>(options_.dim), 0.25f);
    ASSERT_OK(cache_->Apply(ticket, gradients.data(), 1.0f, &runner_));
  }

  Status SetFrequencies(int32_t table, std::vector<int64_t> ids, std::vector<int64_t> counts) {
    int64_t foreign = 0;
    return cache_->SetFrequencies(table, ids, counts, &foreign);
  }

  int64_t WarmStart() {
    int64_t rows = -1;
    EXPECT_OK(cache_->WarmStart(&rows, &runner_));
    return rows;
  }

  MixCacheTableStats Stats(size_t table = 0) { return cache_->Stats().tables[table]; }

  MixCacheOptions options_;
  std::unique_ptr<MixCache> cache_;
  InlineRunner runner_;
};

TEST_F(HintsTest, AnnouncedRowsStayAndAreHits) {
  Make(EvictionPolicyKind::kLookahead, 6);
  Train(Range(0, 2));
  Train(Range(10, 14));
  EXPECT_TRUE(Announce(Range(20, 23)));
  EXPECT_TRUE(Announce(Range(0, 2)));
  Train(Range(20, 23));  // lru would evict 0 and 1.
  Train(Range(0, 2));
  EXPECT_EQ(Stats().hits, 2);
  EXPECT_EQ(Stats().evictions, 3);
}

TEST_F(HintsTest, TheWindowBoundsAnnouncements) {
  Make(EvictionPolicyKind::kLookahead, 6, 2);
  EXPECT_TRUE(Announce(Range(0, 2)));
  EXPECT_TRUE(Announce(Range(2, 4)));
  EXPECT_FALSE(Announce(Range(4, 6)));
  Train(Range(0, 2));
  EXPECT_TRUE(Announce(Range(6, 8)));
}

TEST_F(HintsTest, OtherPoliciesAndWindow0IgnoreAnnouncements) {
  Make(EvictionPolicyKind::kLru, 6);
  EXPECT_FALSE(Announce(Range(0, 2)));
  Make(EvictionPolicyKind::kLookahead, 6, 0);
  EXPECT_FALSE(Announce(Range(0, 2)));
}

TEST_F(HintsTest, AnnouncementsOfBatchesThatNeverComeEnd) {
  Make(EvictionPolicyKind::kLookahead, 4, 2);
  EXPECT_TRUE(Announce(Range(0, 2)));
  EXPECT_TRUE(Announce(Range(2, 4)));
  for (int64_t step = 0; step < 2; ++step) Train(Range(10 + step, 11 + step));
  EXPECT_TRUE(Announce(Range(30, 32)));
}

TEST_F(HintsTest, EndedAnnouncementsKeepNothing) {
  Make(EvictionPolicyKind::kLookahead, 6, 2);
  Train(Range(0, 2));
  Train(Range(2, 6));
  EXPECT_TRUE(Announce(Range(0, 2)));
  EXPECT_TRUE(Announce(Range(50, 52)));
  cache_->EndAnnouncements();
  Train(Range(10, 12));
  EXPECT_EQ(Stats().evictions, 2);
  Train(Range(2, 6));
  EXPECT_EQ(Stats().hits, 4);  // 0 and 1 have left, as the longest unused.
  EXPECT_TRUE(Announce(Range(30, 32)));
}

TEST_F(HintsTest, BatchesWithoutKeysDoNotCount) {
  Make(EvictionPolicyKind::kLookahead, 6, 2);
  EXPECT_FALSE(Announce(Range(0, 0)));
  EXPECT_TRUE(Announce(Range(0, 2)));
  for (int64_t step = 0; step < 5; ++step) Train(Range(0, 0));
  EXPECT_TRUE(Announce(Range(2, 4)));
  EXPECT_FALSE(Announce(Range(4, 6)));
}

TEST_F(HintsTest, AnAnnouncementIsCheckedAndChangesNoCounter) {
  Make(EvictionPolicyKind::kLookahead, 4);
  Train(Range(10, 14));
  EXPECT_TRUE(Announce(Range(0, 2)));  // Its keys are of no use: it is the next batch.
  ReceivedKeys received = Range(2, 4);
  received.tables[0] = 7;
  bool noted = true;
  EXPECT_EQ(cache_->Announce(received, &noted).code(), StatusCode::kInvalidArgument);
  EXPECT_FALSE(noted);
  EXPECT_TRUE(Announce(Range(2, 4)));
  EXPECT_EQ(Stats().requested, 4);
  EXPECT_EQ(Stats().cached_rows, 4);
}

TEST_F(HintsTest, KeysAreLookedAtOnlyWhereSlotsMayRunOut) {
  Make(EvictionPolicyKind::kLookahead, 10);
  const int64_t bytes = cache_->Stats().host_bytes;
  for (int64_t i = 0; i < 10; i += 2) EXPECT_TRUE(Announce(Range(i, i + 2)));
  EXPECT_EQ(cache_->Stats().host_bytes, bytes);
  EXPECT_TRUE(Announce(Range(10, 12)));  // The five batches before it fill all slots, and no more.
  EXPECT_EQ(cache_->Stats().host_bytes, bytes);
  EXPECT_TRUE(Announce(Range(0, 2)));  // The sixth batch evicts, and shall leave these two.
  EXPECT_GT(cache_->Stats().host_bytes, bytes);
  for (int64_t i = 0; i < 12; i += 2) Train(Range(i, i + 2));
  Train(Range(0, 2));
  EXPECT_EQ(Stats().hits, 2);
  EXPECT_EQ(Stats().evictions, 2);
}

TEST_F(HintsTest, AnnounceWhileAPrefetchWaitsForRoom) {
  options_ = CacheOptions(4, {Table("a")});
  options_.policy = EvictionPolicyKind::kLookahead;
  options_.prefetch_wait_seconds = 60.0;
  cache_ = MakeCache(options_);
  int64_t first = 0;
  ASSERT_OK(cache_->Prefetch(Range(0, 4), &first, &runner_));
  std::atomic<bool> done{false};
  std::thread waiting([this, &done] {
    InlineRunner runner;
    int64_t ticket = 0;
    EXPECT_OK(cache_->Prefetch(Range(4, 8), &ticket, &runner));
    EXPECT_OK(cache_->Release(ticket));
    done = true;
  });
  EXPECT_TRUE(Announce(Range(8, 10)));
  EXPECT_FALSE(done);
  EXPECT_OK(cache_->Release(first));
  waiting.join();
}

TEST_F(HintsTest, AnnounceMayRunBesidePrefetches) {
  Make(EvictionPolicyKind::kLookahead, 64);
  std::thread announcing([this] {
    for (int64_t i = 0; i < 300; ++i) Announce(Range(i % 100, i % 100 + 20));
  });
  ReferenceRows model(options_);
  for (int64_t i = 0; i < 300; ++i) {
    const ReceivedKeys received = Range(i % 100, i % 100 + 20);
    model.Apply(received, std::vector<float>(received.ids.size() * static_cast<size_t>(options_.dim), 0.25f), 1.0f);
    Train(received);
  }
  announcing.join();
  EXPECT_EQ(ExportAll(cache_.get(), 0, 50), model.RowsOf(0));
}

TEST_F(HintsTest, FreqKeepsTheMostFrequent) {
  Make(EvictionPolicyKind::kFreq, 4);
  ASSERT_OK(SetFrequencies(0, {1, 2, 3, 4}, {10, 40, 20, 30}));
  Train(Range(1, 5));
  Train(Range(7, 9));
  Train(Range(2, 3));
  Train(Range(4, 5));
  EXPECT_EQ(Stats().hits, 2);
}

TEST_F(HintsTest, WarmStartLoadsTheMostFrequentAndCreatesNothing) {
  Make(EvictionPolicyKind::kFreq, 4);
  ASSERT_OK(SetFrequencies(0, {1, 2, 3, 4}, {10, 40, 20, 30}));
  ASSERT_OK(SetFrequencies(1, {1}, {25}));
  EXPECT_EQ(WarmStart(), 4);
  EXPECT_EQ(Stats().cached_rows, 3);
  EXPECT_EQ(Stats(1).cached_rows, 1);
  EXPECT_EQ(Stats().loads, 3);
  EXPECT_EQ(ReadRows(cache_.get(), Range(1, 5)), ReferenceRows(options_).Read(Range(1, 5)));
  // Nothing was updated: there is no row, neither after a flush nor after an eviction.
  EXPECT_TRUE(ExportAll(cache_.get(), 0, 10).empty());
  ReferenceRows model(options_);
  const auto train = [&](const ReceivedKeys& received) {
    model.Apply(received, std::vector<float>(received.ids.size() * static_cast<size_t>(options_.dim), 0.25f), 1.0f);
    Train(received);
  };
  train(Range(2, 3));
  EXPECT_EQ(Stats().hits, 1);
  train(Range(20, 24));
  EXPECT_EQ(Stats().evictions, 3);
  EXPECT_EQ(ExportAll(cache_.get(), 0, 10), model.RowsOf(0));
  EXPECT_TRUE(ExportAll(cache_.get(), 1, 10).empty());
}

TEST_F(HintsTest, WarmStartEvictsNothingAndLoadsExistingRows) {
  Make(EvictionPolicyKind::kFreq, 3);
  ReferenceRows model(options_);
  const std::vector<float> gradients(2 * static_cast<size_t>(options_.dim), 0.25f);
  model.Apply(Range(5, 7), gradients, 1.0f);
  Train(Range(5, 7));
  ASSERT_OK(SetFrequencies(0, {1, 2, 5}, {7, 8, 9}));
  EXPECT_EQ(WarmStart(), 1);  // 5 is cached already, one slot is free.
  EXPECT_EQ(WarmStart(), 0);
  EXPECT_EQ(Stats().evictions, 0);
  model.Apply(Range(2, 3), std::vector<float>(static_cast<size_t>(options_.dim), 0.25f), 1.0f);
  Train(Range(2, 3));
  EXPECT_EQ(Stats().hits, 1);
  EXPECT_EQ(ExportAll(cache_.get(), 0, 10), model.RowsOf(0));
}

TEST_F(HintsTest, AnImportedWarmRowIsTheImportedOne) {
  Make(EvictionPolicyKind::kFreq, 3);
  ASSERT_OK(SetFrequencies(1, {1}, {7}));
  EXPECT_EQ(WarmStart(), 1);
  const std::vector<int64_t> ids = {1};
  const std::vector<float> rows = {3.0f, 4.0f};
  int64_t foreign = 0;
  ASSERT_OK(cache_->Import(1, ids, rows.data(), nullptr, &foreign, &runner_));
  EXPECT_EQ(ReadRows(cache_.get(), Range(1, 2, 1)), rows);
  Train(Range(1, 2, 1));
  EXPECT_EQ(Stats(1).hits, 1);
  EXPECT_EQ(ReadRows(cache_.get(), Range(1, 2, 1)), (std::vector<float>{2.875f, 3.875f}));  // SGD: 0.5 x 0.25 less.
}

TEST_F(HintsTest, ErrorsNameWhatIsWrong) {
  Make(EvictionPolicyKind::kFreq, 3);
  EXPECT_EQ(SetFrequencies(2, {1}, {1}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(SetFrequencies(0, {1, 2}, {1}).code(), StatusCode::kInvalidArgument);
  const Status negative = SetFrequencies(0, {1, 2}, {1, -5});
  EXPECT_EQ(negative.code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(Mentions(negative, "id 2") && Mentions(negative, "-5")) << negative.message();
  EXPECT_EQ(SetFrequencies(0, {-1}, {1}).code(), StatusCode::kInvalidArgument);
  Make(EvictionPolicyKind::kLfu, 3);
  const Status other = SetFrequencies(0, {1}, {1});
  EXPECT_EQ(other.code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Mentions(other, "embedding.cache.policy")) << other.message();
  EXPECT_EQ(WarmStart(), 0);
}

}  // namespace
}  // namespace hvd_ctr
