#include "tf_ops/core/stage_clock.h"

#include <atomic>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace hvd_ctr {
namespace {

struct Drained {
  std::vector<StageEvent> events;
  int64_t lost = 0;
};

Drained Drain() {
  Drained drained;
  StageClock::Drain(&drained.events, &drained.lost);
  return drained;
}

class StageClockTest : public ::testing::Test {
 protected:
  void SetUp() override {
    StageClock::Stop();
    Drain();
  }
  void TearDown() override { SetUp(); }
};

TEST_F(StageClockTest, EveryStageHasANameOfItsOwn) {
  EXPECT_EQ(std::set<std::string>(kStageNames.begin(), kStageNames.end()).size(), kStageNames.size());
  EXPECT_STREQ(kStageNames[static_cast<size_t>(Stage::kDedupe)], "dedupe");
  EXPECT_STREQ(kStageNames[static_cast<size_t>(Stage::kLoss)], "loss");
  EXPECT_STREQ(kStageNames[static_cast<size_t>(Stage::kUpdate)], "update");
}

TEST_F(StageClockTest, OffNothingIsRecorded) {
  {
    StageTimer timer(Stage::kPlan);
  }
  EXPECT_EQ(TimeStage(Stage::kLookup, [] { return 7; }), 7);
  EXPECT_TRUE(Drain().events.empty());
}

TEST_F(StageClockTest, AScopeIsAnEventAndInnerOnesEndFirst) {
  StageClock::Start();
  const int64_t before = StageClock::NowNs();
  {
    StageTimer update(Stage::kUpdate);
    EXPECT_EQ(TimeStage(Stage::kSegmentSum, [] { return 7; }), 7);
  }
  const int64_t after = StageClock::NowNs();
  const Drained drained = Drain();
  ASSERT_EQ(drained.events.size(), 2u);
  const StageEvent &sum = drained.events[0], &update = drained.events[1];
  EXPECT_EQ(sum.stage, Stage::kSegmentSum);
  EXPECT_EQ(update.stage, Stage::kUpdate);
  EXPECT_LE(before, update.begin_ns);
  EXPECT_LE(update.begin_ns, sum.begin_ns);
  EXPECT_LE(sum.begin_ns, sum.end_ns);
  EXPECT_LE(sum.end_ns, update.end_ns);
  EXPECT_LE(update.end_ns, after);
  EXPECT_TRUE(Drain().events.empty()) << "an event is drained once";
}

TEST_F(StageClockTest, ATimerThatRunsAtTheStopIsRecordedOneThatRunsAtTheStartIsNot) {
  StageClock::Start();
  {
    StageTimer timer(Stage::kPlan);
    StageClock::Stop();
    StageTimer late(Stage::kPool);
    StageClock::Start();
  }
  const Drained drained = Drain();
  ASSERT_EQ(drained.events.size(), 1u);
  EXPECT_EQ(drained.events[0].stage, Stage::kPlan);
}

TEST_F(StageClockTest, WhatFindsNoRoomIsCountedAndTheOldestAreKept) {
  for (int64_t i = 0; i < StageClock::kRingEvents + 5; ++i) StageClock::Record(Stage::kPool, i, i + 1);
  const Drained drained = Drain();
  EXPECT_EQ(drained.lost, 5);
  ASSERT_EQ(drained.events.size(), static_cast<size_t>(StageClock::kRingEvents));
  EXPECT_EQ(drained.events.front().begin_ns, 0);
  EXPECT_EQ(drained.events.back().begin_ns, StageClock::kRingEvents - 1);
  StageClock::Record(Stage::kPool, 99, 100);
  const Drained next = Drain();
  ASSERT_EQ(next.events.size(), 1u);
  EXPECT_EQ(next.events[0].begin_ns, 99);
  EXPECT_EQ(next.lost, 0) << "a loss is told once";
}

TEST_F(StageClockTest, EventsOfAnEndedThreadAreKeptUntilTheyAreDrained) {
  std::thread([] { StageClock::Record(Stage::kHostIo, 1, 2); }).join();
  const Drained drained = Drain();
  ASSERT_EQ(drained.events.size(), 1u);
  EXPECT_EQ(drained.events[0].stage, Stage::kHostIo);
}

// Threads record while another drains: each event comes out once or is counted as lost, in its thread's order, in one piece.
TEST_F(StageClockTest, ConcurrentThreads) {
  constexpr int kThreads = 4;
  constexpr int64_t kEvents = 40'000;
  std::atomic<int> running{kThreads};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([t, &running] {
      for (int64_t i = 0; i < kEvents; ++i) StageClock::Record(static_cast<Stage>(t), i, 3 * i + t);
      --running;
    });
  }
  Drained drained;
  while (running.load() > 0) StageClock::Drain(&drained.events, &drained.lost);
  for (std::thread& thread : threads) thread.join();
  StageClock::Drain(&drained.events, &drained.lost);

  EXPECT_EQ(static_cast<int64_t>(drained.events.size()) + drained.lost, kThreads * kEvents);
  std::map<Stage, int64_t> last;
  for (const StageEvent& event : drained.events) {
    EXPECT_EQ(event.end_ns, 3 * event.begin_ns + static_cast<int64_t>(event.stage));
    const auto found = last.find(event.stage);
    if (found != last.end()) {
      EXPECT_LT(found->second, event.begin_ns);
    }
    last[event.stage] = event.begin_ns;
  }
  EXPECT_EQ(last.size(), static_cast<size_t>(kThreads));
}

}  // namespace
}  // namespace hvd_ctr
