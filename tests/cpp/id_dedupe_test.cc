// IdDedupe and SegmentOrder against the header's examples and a naive model with std::map.
#include "tf_ops/core/id_dedupe.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <limits>
#include <map>
#include <new>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tf_ops/core/hash.h"

namespace {
std::atomic<int64_t> allocations{0};
}  // namespace

// Counts what the steady state must not do. Not inlined: GCC takes inlined halves of a replaced pair for a mismatch.
__attribute__((noinline)) void* operator new(std::size_t size) {
  ++allocations;
  void* const memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) std::abort();
  return memory;
}
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
__attribute__((noinline)) void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace hvd_ctr {

class IdDedupeTestPeer {
 public:
  static void SetEpoch(IdDedupe* dedupe, uint32_t epoch) { dedupe->epoch_ = epoch; }
  static uint32_t epoch(const IdDedupe& dedupe) { return dedupe.epoch_; }
  static size_t slots(const IdDedupe& dedupe) { return dedupe.entries_.size(); }
};

namespace {

constexpr int64_t kMaxId = std::numeric_limits<int64_t>::max();
constexpr int32_t kUntouched = -77;

// One batch that owns its buffers. A strided feature leaves gaps in them which Run must not touch.
struct Batch {
  struct Feature {
    std::vector<int64_t> ids;
    std::vector<int32_t> virtual_ids;
    IdColumn column;
  };
  std::vector<Feature> features;

  Feature& Add(int32_t table, const std::vector<int64_t>& ids, int64_t stride = 1) {
    Feature feature;
    feature.ids.assign(ids.size() * stride, -999);
    feature.virtual_ids.assign(ids.size() * stride, kUntouched);
    for (size_t i = 0; i < ids.size(); ++i) feature.ids[i * stride] = ids[i];
    feature.column.count = static_cast<int64_t>(ids.size());
    feature.column.stride = stride;
    feature.column.table = table;
    features.push_back(feature);
    return features.back();
  }

  std::vector<IdColumn> Columns() {
    std::vector<IdColumn> columns;
    for (Feature& feature : features) {
      feature.column.ids = feature.ids.data();
      feature.column.virtual_ids = feature.virtual_ids.data();
      columns.push_back(feature.column);
    }
    return columns;
  }
};

Status RunBatch(IdDedupe* dedupe, Batch* batch, const std::vector<IdRule>& rules, DedupeResult* result) {
  const std::vector<IdColumn> columns = batch->Columns();
  return dedupe->Run(columns, rules, result);
}

// What Run shall give, written for obviousness.
struct Expected {
  DedupeResult result;
  std::vector<std::vector<int32_t>> virtual_ids;  // Per feature.
};

Expected Model(const Batch& batch, const std::vector<IdRule>& rules) {
  Expected expected;
  DedupeResult& result = expected.result;
  result.table_offsets = {0};
  result.invalid_counts.assign(rules.size(), 0);
  std::map<std::pair<int32_t, int64_t>, int32_t> known;
  size_t f = 0;
  for (int32_t table = 0; table < static_cast<int32_t>(rules.size()); ++table) {
    for (; f < batch.features.size() && batch.features[f].column.table == table; ++f) {
      const IdColumn& column = batch.features[f].column;
      expected.virtual_ids.emplace_back();
      for (int64_t i = 0; i < column.count; ++i) {
        const int64_t raw = batch.features[f].ids[i * column.stride];
        int32_t virtual_id = kNoVirtualId;
        const int64_t id = rules[table].hash_ids ? HashToRange(raw, rules[table].rows) : raw;
        if (column.has_padding && raw == column.padding_id) {
          // Dropped.
        } else if (id < 0 || (rules[table].rows >= 0 && id >= rules[table].rows)) {
          ++result.invalid_counts[table];
          if (result.first_invalid.feature < 0) result.first_invalid = InvalidId{static_cast<int32_t>(f), raw};
        } else {
          const auto [entry, fresh] = known.emplace(std::make_pair(table, id), static_cast<int32_t>(result.keys.size()));
          if (fresh) {
            result.keys.push_back(id);
            result.counts.push_back(0);
          }
          virtual_id = entry->second;
          ++result.counts[virtual_id];
        }
        expected.virtual_ids.back().push_back(virtual_id);
      }
    }
    result.table_offsets.push_back(static_cast<int64_t>(result.keys.size()));
  }
  return expected;
}

void ExpectModel(const Batch& batch, const std::vector<IdRule>& rules, const DedupeResult& result, const std::string& where) {
  const Expected expected = Model(batch, rules);
  ASSERT_EQ(result.keys, expected.result.keys) << where;
  EXPECT_EQ(result.counts, expected.result.counts) << where;
  EXPECT_EQ(result.table_offsets, expected.result.table_offsets) << where;
  EXPECT_EQ(result.invalid_counts, expected.result.invalid_counts) << where;
  EXPECT_EQ(result.first_invalid.feature, expected.result.first_invalid.feature) << where;
  EXPECT_EQ(result.first_invalid.id, expected.result.first_invalid.id) << where;
  for (size_t f = 0; f < batch.features.size(); ++f) {
    const Batch::Feature& feature = batch.features[f];
    for (size_t i = 0; i < feature.virtual_ids.size(); ++i) {
      const bool gap = i % feature.column.stride != 0;
      const int32_t want = gap ? kUntouched : expected.virtual_ids[f][i / feature.column.stride];
      ASSERT_EQ(feature.virtual_ids[i], want) << where << " feature " << f << " position " << i;
    }
  }
}

void RunAndExpectModel(IdDedupe* dedupe, Batch* batch, const std::vector<IdRule>& rules, const std::string& where) {
  DedupeResult result;
  result.keys = {5};  // What an earlier batch left.
  result.counts = {5};
  const Status status = RunBatch(dedupe, batch, rules, &result);
  ASSERT_TRUE(status.ok()) << where << ": " << status.message();
  ExpectModel(*batch, rules, result, where);
}

TEST(IdDedupeTest, HeaderExample) {
  Batch batch;
  batch.Add(0, {7, 3, 7, 9});
  IdDedupe dedupe;
  DedupeResult result;
  ASSERT_TRUE(RunBatch(&dedupe, &batch, {IdRule{}}, &result).ok());
  EXPECT_EQ(result.keys, (std::vector<int64_t>{7, 3, 9}));
  EXPECT_EQ(batch.features[0].virtual_ids, (std::vector<int32_t>{0, 1, 0, 2}));
  EXPECT_EQ(result.counts, (std::vector<int32_t>{2, 1, 1}));
  EXPECT_EQ(result.table_offsets, (std::vector<int64_t>{0, 3}));
  EXPECT_EQ(result.invalid_counts, (std::vector<int64_t>{0}));
  EXPECT_EQ(result.first_invalid.feature, -1);

  std::vector<int32_t> order, offsets;
  SegmentOrder(batch.features[0].virtual_ids, 3, &order, &offsets);
  EXPECT_EQ(order, (std::vector<int32_t>{0, 2, 1, 3}));
  EXPECT_EQ(offsets, (std::vector<int32_t>{0, 2, 3, 4}));
}

TEST(IdDedupeTest, OneIdInTwoTablesIsTwoKeysAndInTwoFeaturesOfOneTableOne) {
  Batch batch;
  batch.Add(0, {5, 6});
  batch.Add(0, {6, 5});
  batch.Add(2, {5});
  IdDedupe dedupe;
  DedupeResult result;
  ASSERT_TRUE(RunBatch(&dedupe, &batch, {IdRule{}, IdRule{}, IdRule{}}, &result).ok());
  EXPECT_EQ(result.keys, (std::vector<int64_t>{5, 6, 5}));
  EXPECT_EQ(result.counts, (std::vector<int32_t>{2, 2, 1}));
  EXPECT_EQ(result.table_offsets, (std::vector<int64_t>{0, 2, 2, 3}));
  EXPECT_EQ(batch.features[1].virtual_ids, (std::vector<int32_t>{1, 0}));
  EXPECT_EQ(batch.features[2].virtual_ids, (std::vector<int32_t>{2}));
}

TEST(IdDedupeTest, FullRangeOfIdsStaysDistinct) {
  const int64_t two53 = int64_t{1} << 53;
  const int64_t two31 = int64_t{1} << 31;
  Batch batch;
  batch.Add(0, {two53, two53 + 1, 0, kMaxId, two31, two31 - 1, two31 + 1, kMaxId - 1, two53 - 1, int64_t{1} << 32, 0, two53 + 1});
  IdDedupe dedupe;
  DedupeResult result;
  ASSERT_TRUE(RunBatch(&dedupe, &batch, {IdRule{}}, &result).ok());
  EXPECT_EQ(result.keys.size(), 10u);
  EXPECT_EQ(batch.features[0].virtual_ids, (std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 1}));
  EXPECT_EQ(result.invalid_counts[0], 0);
}

TEST(IdDedupeTest, EmptyInputs) {
  IdDedupe dedupe;
  Batch none;
  RunAndExpectModel(&dedupe, &none, {}, "no tables");
  RunAndExpectModel(&dedupe, &none, {IdRule{}, IdRule{}}, "no columns");
  Batch empty;
  empty.Add(0, {});
  empty.Add(1, {});
  RunAndExpectModel(&dedupe, &empty, {IdRule{}, IdRule{}}, "no ids");
  Batch one;
  one.Add(1, {42});
  RunAndExpectModel(&dedupe, &one, {IdRule{}, IdRule{}, IdRule{}}, "one id");
}

TEST(IdDedupeTest, SizesAroundBlocksAllEqualAndAllDistinct) {
  IdDedupe dedupe;
  for (const int64_t n : {1, 2, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1000, 5000}) {
    std::vector<int64_t> equal(n, 12345), distinct(n), downward(n), far(n);
    for (int64_t i = 0; i < n; ++i) {
      distinct[i] = i;
      downward[i] = kMaxId - i;
      far[i] = i << 40;
    }
    for (const auto& ids : {equal, distinct, downward, far}) {
      Batch batch;
      batch.Add(0, ids);
      RunAndExpectModel(&dedupe, &batch, {IdRule{}}, "n = " + std::to_string(n));
    }
  }
}

TEST(IdDedupeTest, RowMajorMatrixOf26Columns) {
  constexpr int64_t kRows = 300, kFeatures = 26;
  std::mt19937_64 random(3);
  std::vector<int64_t> ids(kRows * kFeatures);
  std::vector<int32_t> virtual_ids(ids.size(), kUntouched);
  for (int64_t& id : ids) id = static_cast<int64_t>(random() % 50);
  std::vector<IdColumn> columns(kFeatures);
  Batch model;
  for (int64_t f = 0; f < kFeatures; ++f) {
    const int32_t table = static_cast<int32_t>(f / 2);
    columns[f].ids = ids.data() + f;
    columns[f].virtual_ids = virtual_ids.data() + f;
    columns[f].count = kRows;
    columns[f].stride = kFeatures;
    columns[f].table = table;
    std::vector<int64_t> values;
    for (int64_t i = 0; i < kRows; ++i) values.push_back(ids[i * kFeatures + f]);
    model.Add(table, values);
  }
  const std::vector<IdRule> rules(13);
  IdDedupe dedupe;
  DedupeResult result;
  ASSERT_TRUE(dedupe.Run(columns, rules, &result).ok());
  const Expected expected = Model(model, rules);
  EXPECT_EQ(result.keys, expected.result.keys);
  EXPECT_EQ(result.counts, expected.result.counts);
  for (int64_t f = 0; f < kFeatures; ++f) {
    for (int64_t i = 0; i < kRows; ++i) ASSERT_EQ(virtual_ids[i * kFeatures + f], expected.virtual_ids[f][i]) << f << " " << i;
  }
}

TEST(IdDedupeTest, InvalidIdsAreDroppedAndCounted) {
  Batch batch;
  batch.Add(0, {1, 100, 99, 0});
  batch.Add(1, {-3, 7, std::numeric_limits<int64_t>::min(), kMaxId});
  batch.Add(2, {0, 1});
  IdRule bounded, unbounded, none;
  bounded.rows = 100;
  none.rows = 0;  // A table without rows has no valid id.
  IdDedupe dedupe;
  DedupeResult result;
  ASSERT_TRUE(RunBatch(&dedupe, &batch, {bounded, unbounded, none}, &result).ok());
  EXPECT_EQ(result.keys, (std::vector<int64_t>{1, 99, 0, 7, kMaxId}));
  EXPECT_EQ(result.invalid_counts, (std::vector<int64_t>{1, 2, 2}));
  EXPECT_EQ(result.first_invalid.feature, 0);
  EXPECT_EQ(result.first_invalid.id, 100);
  EXPECT_EQ(batch.features[0].virtual_ids, (std::vector<int32_t>{0, -1, 1, 2}));
  EXPECT_EQ(batch.features[1].virtual_ids, (std::vector<int32_t>{-1, 3, -1, 4}));
  EXPECT_EQ(batch.features[2].virtual_ids, (std::vector<int32_t>{-1, -1}));
}

TEST(IdDedupeTest, PaddingComesBeforeRangeAndHash) {
  Batch batch;
  Batch::Feature& negative = batch.Add(0, {-1, 4, -2, -1});
  negative.column.has_padding = true;  // padding_id stays -1.
  Batch::Feature& legal = batch.Add(0, {0, 4, 0, 5});
  legal.column.has_padding = true;
  legal.column.padding_id = 0;
  batch.Add(0, {0});  // Another feature of the table, for which 0 is an id.
  Batch::Feature& hashed = batch.Add(1, {-1, -5, -1, -5});
  hashed.column.has_padding = true;
  IdRule hash;
  hash.hash_ids = true;
  hash.rows = 1000;
  IdDedupe dedupe;
  DedupeResult result;
  ASSERT_TRUE(RunBatch(&dedupe, &batch, {IdRule{}, hash}, &result).ok());
  EXPECT_EQ(result.keys, (std::vector<int64_t>{4, 5, 0, HashToRange(-5, 1000)}));
  EXPECT_EQ(result.invalid_counts, (std::vector<int64_t>{1, 0}));
  EXPECT_EQ(result.first_invalid.feature, 0);
  EXPECT_EQ(result.first_invalid.id, -2);
  EXPECT_EQ(batch.features[0].virtual_ids, (std::vector<int32_t>{-1, 0, -1, -1}));
  EXPECT_EQ(batch.features[1].virtual_ids, (std::vector<int32_t>{-1, 0, -1, 1}));
  EXPECT_EQ(batch.features[2].virtual_ids, (std::vector<int32_t>{2}));
  EXPECT_EQ(batch.features[3].virtual_ids, (std::vector<int32_t>{-1, 3, -1, 3}));
}

TEST(IdDedupeTest, HashedIdsAreNeverInvalidAndMeetAfterHashing) {
  std::vector<int64_t> ids;
  for (int64_t i = -500; i < 500; ++i) ids.push_back(i * 1234567891011);
  Batch batch;
  batch.Add(0, ids);
  IdRule rule;
  rule.hash_ids = true;
  rule.rows = 10;
  IdDedupe dedupe;
  DedupeResult result;
  ASSERT_TRUE(RunBatch(&dedupe, &batch, {rule}, &result).ok());
  EXPECT_EQ(std::set<int64_t>(result.keys.begin(), result.keys.end()), (std::set<int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  EXPECT_EQ(result.keys.size(), 10u);
  EXPECT_EQ(result.invalid_counts[0], 0);
  ExpectModel(batch, {rule}, result, "hashed");
}

// A random batch over random rules: strides, paddings, hashing, ranges, empty features and tables without any.
Batch RandomBatch(std::mt19937_64* random, std::vector<IdRule>* rules) {
  const auto draw = [&](int64_t n) { return static_cast<int64_t>((*random)() % static_cast<uint64_t>(n)); };
  rules->assign(1 + draw(5), IdRule{});
  for (IdRule& rule : *rules) {
    if (draw(2) == 0) rule.rows = 1 + draw(2000);
    rule.hash_ids = rule.rows > 0 && draw(2) == 0;
  }
  Batch batch;
  for (int32_t table = 0; table < static_cast<int32_t>(rules->size()); ++table) {
    for (int64_t f = draw(4); f > 0; --f) {
      std::vector<int64_t> ids(draw(3) == 0 ? draw(4) : draw(700));
      const int64_t range = 1 + draw(3000);
      const int64_t step = draw(2) == 0 ? 1 : int64_t{1} << draw(50);
      for (int64_t& id : ids) id = (draw(range) - (draw(20) == 0 ? 5 : 0)) * step;
      Batch::Feature& feature = batch.Add(table, ids, 1 + draw(4));
      feature.column.has_padding = draw(2) == 0;
      feature.column.padding_id = draw(3) == 0 ? -1 : draw(range) * step;
    }
  }
  return batch;
}

TEST(IdDedupeTest, RandomBatchesEqualTheModelWhateverCameBefore) {
  std::mt19937_64 random(20240607);
  IdDedupe reused;
  for (int i = 0; i < 300; ++i) {
    std::vector<IdRule> rules;
    Batch batch = RandomBatch(&random, &rules);
    RunAndExpectModel(&reused, &batch, rules, "reused, batch " + std::to_string(i));
    IdDedupe fresh;
    RunAndExpectModel(&fresh, &batch, rules, "fresh, batch " + std::to_string(i));
  }
}

TEST(IdDedupeTest, EpochWrapForgetsWhatWasStamped) {
  std::vector<int64_t> ids(50);
  for (int64_t i = 0; i < 50; ++i) ids[i] = i;
  Batch first;
  first.Add(0, ids);
  const std::vector<IdRule> rules(2);
  IdDedupe dedupe;
  RunAndExpectModel(&dedupe, &first, rules, "before");
  const uint32_t stamped = IdDedupeTestPeer::epoch(dedupe);
  ASSERT_EQ(stamped, 1u);
  // Table 1 of the next batch gets the epoch that the slots of `first` carry.
  IdDedupeTestPeer::SetEpoch(&dedupe, std::numeric_limits<uint32_t>::max() - 1);
  Batch second;
  second.Add(0, {9, 3, 3});
  second.Add(1, {40, 20, 40});
  RunAndExpectModel(&dedupe, &second, rules, "over the wrap");
  EXPECT_EQ(IdDedupeTestPeer::epoch(dedupe), stamped);
  RunAndExpectModel(&dedupe, &first, rules, "after");
}

TEST(IdDedupeTest, SlotsFollowUniqueKeysNotIds) {
  std::vector<int64_t> ids(200000);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i % 100);
  Batch batch;
  batch.Add(0, ids);
  IdDedupe dedupe;
  RunAndExpectModel(&dedupe, &batch, {IdRule{}}, "few keys");
  EXPECT_LE(IdDedupeTestPeer::slots(dedupe), 4096u);
}

TEST(IdDedupeTest, SteadyStateAllocatesNothing) {
  std::mt19937_64 random(8);
  const std::vector<IdRule> rules(3);
  std::vector<Batch> batches(4);
  for (Batch& batch : batches) {
    for (int32_t table = 0; table < 3; ++table) {
      std::vector<int64_t> ids(3000);
      for (int64_t& id : ids) id = static_cast<int64_t>(random() % (1 + 900 * table));
      batch.Add(table, ids);
    }
  }
  IdDedupe dedupe;
  DedupeResult result;
  for (Batch& batch : batches) ASSERT_TRUE(RunBatch(&dedupe, &batch, rules, &result).ok());
  const std::vector<IdColumn> columns = batches[1].Columns();
  const int64_t before = allocations;
  const Status status = dedupe.Run(columns, rules, &result);
  EXPECT_EQ(allocations - before, 0);
  EXPECT_TRUE(status.ok());
}

TEST(IdDedupeTest, RefusesWhatItCannotRun) {
  int64_t id = 1;
  int32_t virtual_id = 0;
  const auto column = [&](int32_t table, int64_t count) {
    IdColumn c;
    c.ids = &id;
    c.virtual_ids = &virtual_id;
    c.count = count;
    c.table = table;
    return c;
  };
  const auto message = [](std::vector<IdColumn> columns, std::vector<IdRule> rules) {
    IdDedupe dedupe;
    DedupeResult result;
    const Status status = dedupe.Run(columns, rules, &result);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(result.keys.empty());
    return status.message();
  };
  const auto has = [](const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; };
  const std::vector<IdRule> two(2);
  EXPECT_TRUE(has(message({column(1, 1), column(0, 1)}, two), "feature 1 of table 0 follows one of table 1"));
  EXPECT_TRUE(has(message({column(2, 1)}, two), "feature 0 names table 2; tables are 0 .. 1"));
  EXPECT_TRUE(has(message({column(-1, 1)}, two), "names table -1"));
  EXPECT_TRUE(has(message({column(0, -1)}, two), "has -1 ids"));
  // No pointer is followed before the count is known to fit.
  EXPECT_TRUE(has(message({column(0, 1), column(0, std::numeric_limits<int32_t>::max())}, two), "more than 2147483647 ids"));
  EXPECT_TRUE(has(message({column(0, std::numeric_limits<int64_t>::max())}, two), "more than 2147483647 ids"));
  IdColumn no_buffer = column(0, 1);
  no_buffer.virtual_ids = nullptr;
  EXPECT_TRUE(has(message({no_buffer}, two), "no buffer for virtual ids"));
  IdRule hash_without_rows;
  hash_without_rows.hash_ids = true;
  EXPECT_TRUE(has(message({column(0, 1)}, {hash_without_rows}), "hash_ids needs rows > 0"));
}

TEST(SegmentOrderTest, EqualsStableSortOnRandomVirtualIds) {
  std::mt19937_64 random(11);
  std::vector<int32_t> order, offsets;
  for (int round = 0; round < 200; ++round) {
    const int64_t n = static_cast<int64_t>(random() % 400);
    const int64_t unique = static_cast<int64_t>(random() % 50);
    std::vector<int32_t> ids(n);
    for (int32_t& id : ids) id = static_cast<int32_t>(random() % (unique + 3)) - 1;  // -1 and unique, unique + 1 too.
    SegmentOrder(ids, unique, &order, &offsets);
    std::vector<int32_t> want_order, want_offsets = {0};
    for (int64_t u = 0; u < unique; ++u) {
      for (int64_t i = 0; i < n; ++i) {
        if (ids[i] == u) want_order.push_back(static_cast<int32_t>(i));
      }
      want_offsets.push_back(static_cast<int32_t>(want_order.size()));
    }
    ASSERT_EQ(order, want_order) << round;
    ASSERT_EQ(offsets, want_offsets) << round;
  }
}

}  // namespace
}  // namespace hvd_ctr
