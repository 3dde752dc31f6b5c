// What RowLife decides: which occurrence makes a row, which rows end, and that the number of ranks does not matter.
#include "tf_ops/core/row_life.h"

#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <random>
#include <set>

#include "tf_ops/core/hash.h"

namespace hvd_ctr {
namespace {

TableOptions Options(int64_t min_count, int64_t max_idle_steps, int64_t max_rows, int64_t sweep_every_steps = 1) {
  TableOptions table;
  table.name = "t";
  table.min_count = min_count;
  table.max_idle_steps = max_idle_steps;
  table.max_rows = max_rows;
  table.sweep_every_steps = sweep_every_steps;
  return table;
}

RowLife::Occurrence Occurs(int64_t id, int64_t count = 1, int32_t table = 0) {
  const Key key{id, table};
  return {key, HashKey(table, id, kDirectorySalt), count, 0};
}

// Whether each key of the batch is trained, counting it.
std::vector<uint8_t> Train(RowLife* life, const std::vector<RowLife::Occurrence>& batch, int64_t step) {
  std::vector<uint8_t> admitted(batch.size(), 9);
  life->Decide(batch, admitted.data());
  life->Count(batch, step);
  return admitted;
}

std::vector<int64_t> AgesOf(const RowLife& life, int64_t step, int32_t table = 0) {
  std::vector<int64_t> bins(static_cast<size_t>(kAgeBins), 0);
  life.Ages(table, step, bins);
  return bins;
}

// A sweep of the only rank.
void SelectAlone(RowLife* life, int64_t step, RowLife::Ended* ended) {
  const std::vector<int64_t> ages = AgesOf(*life, step);
  life->Select(0, step, ages, ended);
}

std::set<int64_t> Ids(const std::vector<Key>& keys) {
  std::set<int64_t> ids;
  for (const Key& key : keys) EXPECT_TRUE(ids.insert(key.id).second);
  return ids;
}

TEST(RowLifeTest, AgeBinsAreSingleStepsThenNarrowAndNeverFall) {
  for (int64_t age = 0; age < 512; ++age) EXPECT_EQ(AgeBin(age), age);
  int64_t previous = 511;
  for (int64_t age = 512; age < 100000; ++age) {
    const int64_t bin = AgeBin(age);
    ASSERT_TRUE(bin == previous || bin == previous + 1) << age;
    ASSERT_EQ(AgeBin(age + age / 256 + 1) > bin, true) << "a bin is at most a 256th of the age wide";
    previous = bin;
  }
  EXPECT_EQ(AgeBin((int64_t{1} << 40) - 1), kAgeBins - 1);
  EXPECT_EQ(AgeBin(std::numeric_limits<int64_t>::max()), kAgeBins - 1);
}

TEST(RowLifeTest, TheKthOccurrenceMakesTheRow) {
  const std::vector<TableOptions> tables = {Options(3, 0, 0), Options(1, 0, 0)};
  RowLife life(tables);
  EXPECT_FALSE(life.empty());
  EXPECT_TRUE(life.tracks(0));
  EXPECT_FALSE(life.tracks(1));
  EXPECT_TRUE(RowLife({tables[1], tables[1]}).empty());
  EXPECT_EQ(Train(&life, {Occurs(7), Occurs(8, 3), Occurs(9, 2)}, 1), (std::vector<uint8_t>{0, 1, 0}));
  EXPECT_EQ(life.rows(0), 1);
  EXPECT_EQ(life.waiting(0), 2);
  EXPECT_EQ(Train(&life, {Occurs(7), Occurs(8), Occurs(9)}, 2), (std::vector<uint8_t>{0, 1, 1}));
  EXPECT_EQ(Train(&life, {Occurs(7)}, 5), (std::vector<uint8_t>{1}));
  EXPECT_EQ(life.rows(0), 3);
  EXPECT_EQ(life.waiting(0), 0);
  EXPECT_EQ(life.Find({7, 0}).count, 3);
  EXPECT_EQ(life.Find({7, 0}).last_step, 5);
  EXPECT_EQ(life.Find({8, 0}).count, 4);
  EXPECT_EQ(life.Find({10, 0}).count, 0);
}

TEST(RowLifeTest, DecidingChangesNothing) {
  RowLife life({Options(2, 0, 0)});
  std::vector<uint8_t> admitted(1);
  for (int i = 0; i < 5; ++i) {
    const std::vector<RowLife::Occurrence> batch = {Occurs(4)};
    life.Decide(batch, admitted.data());
    EXPECT_EQ(admitted[0], 0);
  }
  EXPECT_EQ(life.waiting(0), 0);
  EXPECT_EQ(life.Find({4, 0}).count, 0);
}

TEST(RowLifeTest, IdleRowsEndAndIdleCountsAreForgotten) {
  RowLife life({Options(2, 10, 0)});
  Train(&life, {Occurs(1, 2), Occurs(2, 2), Occurs(3)}, 1);
  Train(&life, {Occurs(2), Occurs(4)}, 2);
  RowLife::Ended ended;
  life.Select(0, 11, {}, &ended);
  EXPECT_TRUE(ended.idle.empty());
  EXPECT_EQ(life.waiting(0), 2);
  life.Select(0, 12, {}, &ended);
  EXPECT_EQ(Ids(ended.idle), (std::set<int64_t>{1}));
  EXPECT_TRUE(ended.excess.empty());
  EXPECT_EQ(life.waiting(0), 1);
  EXPECT_EQ(life.Find({3, 0}).count, 0);
  life.Erase(ended.idle);
  EXPECT_EQ(life.rows(0), 1);
  EXPECT_EQ(Train(&life, {Occurs(1), Occurs(3)}, 13), (std::vector<uint8_t>{0, 0})) << "as if never seen";
}

TEST(RowLifeTest, TheLongestUntrainedRowsBeyondMaxRowsEndInWholeBins) {
  RowLife life({Options(1, 0, 5)});
  for (int64_t step = 1; step <= 4; ++step) Train(&life, {Occurs(10 * step), Occurs(10 * step + 1)}, step);
  RowLife::Ended ended;
  SelectAlone(&life, 4, &ended);
  EXPECT_EQ(Ids(ended.excess), (std::set<int64_t>{10, 11, 20, 21})) << "with 20 or 21 alone 5 rows would remain";
  EXPECT_TRUE(ended.idle.empty());
  life.Erase(ended.excess);
  EXPECT_EQ(life.rows(0), 4);
  SelectAlone(&life, 4, &ended);
  EXPECT_TRUE(ended.excess.empty());
}

TEST(RowLifeTest, RowsThatAreIdleDoNotCountAgainstMaxRows) {
  RowLife life({Options(1, 5, 2)});
  Train(&life, {Occurs(1), Occurs(2), Occurs(3)}, 1);
  Train(&life, {Occurs(4)}, 4);
  Train(&life, {Occurs(5)}, 9);
  RowLife::Ended ended;
  SelectAlone(&life, 9, &ended);
  EXPECT_EQ(Ids(ended.idle), (std::set<int64_t>{1, 2, 3}));
  EXPECT_TRUE(ended.excess.empty());
}

TEST(RowLifeTest, SweepsAreDueAfterMultiplesOfTheirSteps) {
  RowLife life({Options(1, 5, 0, 4), Options(1, 0, 5, 3), Options(7, 0, 0, 1), Options(1, 0, 0, 1)});
  for (int64_t step = 1; step < 30; ++step) {
    EXPECT_EQ(life.due(0, step), step % 4 == 0);
    EXPECT_EQ(life.due(1, step), step % 3 == 0);
    EXPECT_FALSE(life.due(2, step) || life.due(3, step)) << "nothing of theirs ever ends";
  }
}

TEST(RowLifeTest, CountsStopAtTheirMostAndStepsStay) {
  RowLife life({Options(RowLife::kMostCount, 0, 0)});
  EXPECT_EQ(Train(&life, {Occurs(1, RowLife::kMostCount - 1)}, 3), (std::vector<uint8_t>{0}));
  EXPECT_EQ(Train(&life, {Occurs(1, std::numeric_limits<int32_t>::max())}, (int64_t{1} << 40) - 2), (std::vector<uint8_t>{1}));
  EXPECT_EQ(life.Find({1, 0}).count, RowLife::kMostCount);
  EXPECT_EQ(life.Find({1, 0}).last_step, (int64_t{1} << 40) - 2);
  EXPECT_EQ(Train(&life, {Occurs(1)}, int64_t{1} << 50), (std::vector<uint8_t>{1}));
  EXPECT_EQ(life.Find({1, 0}).last_step, (int64_t{1} << 40) - 1);
}

TEST(RowLifeTest, RestoredIdsAreRowsWhereTheyHaveARow) {
  RowLife life({Options(3, 0, 0), Options(1, 9, 0)});
  life.Set({1, 0}, {2, 40}, /*has_row=*/true);
  life.Set({2, 0}, {7, 41}, /*has_row=*/false);
  life.Set({3, 0}, {0, 42}, /*has_row=*/false);
  life.Set({4, 1}, {1, 43}, /*has_row=*/false);
  EXPECT_EQ(life.Find({1, 0}).count, 3);
  EXPECT_EQ(life.Find({1, 0}).last_step, 40);
  EXPECT_EQ(life.Find({2, 0}).count, 2);
  EXPECT_EQ(life.rows(0), 1);
  EXPECT_EQ(life.waiting(0), 1);
  EXPECT_EQ(life.waiting(1), 0) << "nothing waits in a table without min_count";
  life.Set({1, 0}, {9, 50}, /*has_row=*/true);
  EXPECT_EQ(life.rows(0), 1);
  EXPECT_EQ(life.Find({1, 0}).count, 9);
}

// The ranks' parts together decide as one process does: same admissions, same sums of ages, same rows end.
TEST(RowLifeTest, AnyNumberOfRanksDecidesAlike) {
  const std::vector<TableOptions> tables = {Options(2, 30, 60, 4)};
  std::mt19937_64 random(4);
  RowLife one(tables);
  std::vector<RowLife> ranks(3, RowLife(tables));
  for (int64_t step = 1; step <= 300; ++step) {
    std::map<int64_t, int64_t> counts;
    for (int i = 0; i < 20; ++i) ++counts[static_cast<int64_t>(random() % (20 + random() % 300))];
    std::vector<RowLife::Occurrence> all;
    std::vector<std::vector<RowLife::Occurrence>> parts(ranks.size());
    for (const auto& [id, count] : counts) {
      all.push_back(Occurs(id, count));
      parts[static_cast<size_t>(OwnerOf(0, id, 3))].push_back(all.back());
    }
    const std::vector<uint8_t> expected = Train(&one, all, step);
    std::map<int64_t, uint8_t> admitted;
    for (size_t r = 0; r < ranks.size(); ++r) {
      const std::vector<uint8_t> mine = Train(&ranks[r], parts[r], step);
      for (size_t i = 0; i < mine.size(); ++i) admitted[parts[r][i].key.id] = mine[i];
    }
    for (size_t i = 0; i < all.size(); ++i) ASSERT_EQ(admitted.at(all[i].key.id), expected[i]);
    if (!one.due(0, step)) continue;
    std::vector<int64_t> sums(static_cast<size_t>(kAgeBins), 0);
    for (const RowLife& rank : ranks) rank.Ages(0, step, sums);
    ASSERT_EQ(sums, AgesOf(one, step));
    RowLife::Ended ended, part;
    one.Select(0, step, sums, &ended);
    std::set<int64_t> idle, excess;
    for (RowLife& rank : ranks) {
      rank.Select(0, step, sums, &part);
      idle.merge(Ids(part.idle));
      excess.merge(Ids(part.excess));
      rank.Erase(part.idle);
      rank.Erase(part.excess);
    }
    ASSERT_EQ(idle, Ids(ended.idle));
    ASSERT_EQ(excess, Ids(ended.excess));
    one.Erase(ended.idle);
    one.Erase(ended.excess);
    ASSERT_LE(one.rows(0), 60);
    ASSERT_EQ(one.rows(0), ranks[0].rows(0) + ranks[1].rows(0) + ranks[2].rows(0));
    ASSERT_EQ(one.waiting(0), ranks[0].waiting(0) + ranks[1].waiting(0) + ranks[2].waiting(0));
  }
}

TEST(RowLifeTest, WaitingIdsComeInChunksEachOnce) {
  RowLife life({Options(2, 0, 0)});
  for (int64_t id = 0; id < 1000; ++id) Train(&life, {Occurs(id << (id % 40), id % 3 == 0 ? 2 : 1)}, id + 1);
  for (const int64_t chunk : {1, 7, 100000}) {
    std::vector<int64_t> ids;
    std::vector<RowLife::Id> found;
    for (int64_t cursor = 0; cursor >= 0;) {
      const size_t before = ids.size();
      life.ScanWaiting(0, &cursor, chunk, &ids, &found);
      ASSERT_LE(static_cast<int64_t>(ids.size() - before), chunk);
    }
    ASSERT_EQ(static_cast<int64_t>(std::set<int64_t>(ids.begin(), ids.end()).size()), life.waiting(0));
    ASSERT_EQ(static_cast<int64_t>(ids.size()), life.waiting(0));
    for (const RowLife::Id& id : found) ASSERT_EQ(id.count, 1);
  }
}

// The memory that the header promises.
TEST(RowLifeTest, MemoryPerId) {
  RowLife life({Options(1, 5, 0)});
  EXPECT_EQ(life.allocated_bytes(), 0);
  for (int64_t id = 0; id < 200000; ++id) {
    Train(&life, {Occurs(id)}, 1);
    if (id < 1000) continue;
    ASSERT_GE(life.allocated_bytes(), 36 * id);
    ASSERT_LE(life.allocated_bytes(), 73 * id);
  }
}

}  // namespace
}  // namespace hvd_ctr
