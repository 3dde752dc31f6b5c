// FactorPlan against its definition: which features are factored, and that slots and distinct rows give the ids back.
#include "tf_ops/core/factor_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <vector>

namespace hvd_ctr {
namespace {

constexpr int64_t kUnique = 1 << 13;  ///< More rows than any batch has.

struct Batch {
  int64_t samples, features;
  std::vector<int32_t> ids;  ///< (samples, features)

  int32_t at(int64_t b, int64_t f) const { return ids[b * features + f]; }
  int64_t distinct(int64_t f) const {
    std::set<int32_t> rows;
    for (int64_t b = 0; b < samples; ++b) rows.insert(at(b, f));
    rows.erase(-1);
    return static_cast<int64_t>(rows.size());
  }
};

/// Feature f has about rows_of(f) distinct rows; some rows belong to several features, some ids are dropped.
Batch MakeBatch(int64_t samples, int64_t features, uint64_t seed) {
  std::mt19937_64 generator(seed);
  Batch batch{samples, features, {}};
  for (int64_t b = 0; b < samples; ++b) {
    for (int64_t f = 0; f < features; ++f) {
      const auto row = static_cast<int32_t>(generator() % static_cast<uint64_t>(1 + 3 * f * f) + 2 * f);
      batch.ids.push_back(generator() % 11 == 0 ? -1 : row);
    }
  }
  return batch;
}

void ExpectGivesTheIdsBack(const FactorPlan& plan, const Batch& batch) {
  const auto factored = static_cast<int64_t>(plan.factored().size()), direct = static_cast<int64_t>(plan.direct().size());
  ASSERT_EQ(factored + direct, batch.features);
  std::vector<int32_t> slots(factored * batch.samples, -7), direct_ids(direct * batch.samples, -7);
  plan.WriteSlots(slots);
  plan.WriteDirectIds(batch.ids, direct_ids);
  const auto dropped = static_cast<int32_t>(plan.distinct().size());
  for (int64_t b = 0; b < batch.samples; ++b) {
    for (int64_t i = 0; i < factored; ++i) {
      const int32_t slot = slots[b * factored + i];
      const int32_t row = batch.at(b, plan.factored()[i]);
      if (row < 0) {
        ASSERT_EQ(slot, dropped);
        continue;
      }
      ASSERT_GE(slot, plan.begins()[i]);
      ASSERT_LT(slot, plan.begins()[i + 1]);
      ASSERT_EQ(plan.distinct()[slot], row);
    }
    for (int64_t i = 0; i < direct; ++i) ASSERT_EQ(direct_ids[b * direct + i], batch.at(b, plan.direct()[i]));
  }
}

TEST(FactorPlanTest, FactorsTheFeaturesWithFewDistinctRows) {
  FactorPlan plan;  // One for all batches: nothing of an earlier one is left.
  for (const double share : {0.0, 0.1, 0.3, 1.0}) {
    for (const int64_t samples : {0, 1, 16, 17, 250, 1024}) {
      for (const int64_t features : {1, 7, 40}) {
        const Batch batch = MakeBatch(samples, features, samples + features);
        ASSERT_TRUE(plan.Make(batch.ids, samples, features, kUnique, {share, 1 << 20}).ok());
        std::vector<int32_t> expected;
        for (int64_t f = 0; f < features; ++f) {
          if (batch.distinct(f) <= static_cast<int64_t>(share * samples)) expected.push_back(static_cast<int32_t>(f));
        }
        EXPECT_EQ(plan.factored(), expected) << share << " " << samples << " " << features;
        for (size_t i = 0; i < expected.size(); ++i) {
          EXPECT_EQ(plan.begins()[i + 1] - plan.begins()[i], batch.distinct(expected[i]));
        }
        EXPECT_TRUE(std::is_sorted(plan.direct().begin(), plan.direct().end()));
        ExpectGivesTheIdsBack(plan, batch);
      }
    }
  }
}

TEST(FactorPlanTest, TakesTheFeaturesWithTheFewestRowsUntilTheLimit) {
  const Batch batch{4,
                    4,
                    {0, 10, 20, 30,  //
                     0, 11, 21, 31,  //
                     1, 12, 21, 31,  //
                     2, 13, 21, 31}};
  FactorPlan plan;
  // Distinct rows: 3, 4, 2, 2. Of features with as many the first comes first.
  const std::vector<std::pair<int64_t, std::vector<int32_t>>> expected = {
      {11, {0, 1, 2, 3}}, {10, {0, 2, 3}}, {7, {0, 2, 3}}, {6, {2, 3}}, {4, {2, 3}}, {3, {2}}, {2, {2}}, {1, {}}, {0, {}}};
  for (const auto& [limit, features] : expected) {
    ASSERT_TRUE(plan.Make(batch.ids, 4, 4, 32, {1.0, limit}).ok());
    EXPECT_EQ(plan.factored(), features) << limit;
    ExpectGivesTheIdsBack(plan, batch);
  }
}

TEST(FactorPlanTest, DistinctRowsAreInTheOrderOfTheSamples) {
  const std::vector<int32_t> ids = {5, 5, 2, 9, 2, 5};  // Feature 0: 5 2 2, feature 1: 5 9 5.
  FactorPlan plan;
  ASSERT_TRUE(plan.Make(ids, 3, 2, 10, {1.0, 100}).ok());
  EXPECT_EQ(plan.distinct(), (std::vector<int32_t>{5, 2, 5, 9}));
  EXPECT_EQ(plan.begins(), (std::vector<int32_t>{0, 2, 4}));
  std::vector<int32_t> slots(6);
  plan.WriteSlots(slots);
  EXPECT_EQ(slots, (std::vector<int32_t>{0, 2, 1, 3, 1, 2}));
}

TEST(FactorPlanTest, AFeatureWithoutIdsIsFactoredWithNoRow) {
  const std::vector<int32_t> ids = {-1, 3, -1, 4};
  FactorPlan plan;
  ASSERT_TRUE(plan.Make(ids, 2, 2, 5, {0.0, 100}).ok());
  EXPECT_EQ(plan.factored(), std::vector<int32_t>{0});
  EXPECT_TRUE(plan.distinct().empty());
}

TEST(FactorPlanTest, RefusesWhatIsNoBatch) {
  FactorPlan plan;
  const std::vector<int32_t> ids = {0, 1, 2, -1}, negative = {0, 1, 2, -2}, great = {0, INT32_MAX, 2, -1};
  EXPECT_TRUE(plan.Make(ids, 2, 2, 3, {}).ok());
  // Before memory is taken for so many rows.
  for (const auto& [bad, text] : {std::pair(negative, "row -2 of sample 1, feature 1, is outside [0, 3)"),
                                  std::pair(great, "row 2147483647 of sample 0, feature 1"), std::pair(ids, "")}) {
    const Status status = plan.Make(bad, 2, 2, bad == ids ? 2 : 3, {});
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(text), std::string::npos) << status.message();
  }
  EXPECT_FALSE(plan.Make(ids, 3, 2, 3, {}).ok());
  EXPECT_FALSE(plan.Make(ids, 2, 2, 3, {1.5, 10}).ok());
  EXPECT_FALSE(plan.Make(ids, 2, 2, 3, {-0.5, 10}).ok());
  EXPECT_FALSE(plan.Make(ids, 2, 2, 3, {std::nan(""), 10}).ok());
  EXPECT_FALSE(plan.Make(ids, 2, 2, 3, {0.5, -1}).ok());
}

}  // namespace
}  // namespace hvd_ctr
