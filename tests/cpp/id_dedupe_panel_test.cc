// Columns of row-major matrices give what the same columns give one by one in contiguous memory (which id_dedupe_test.cc compares
// with a model), on every level of vector instructions.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "tf_ops/core/id_dedupe.h"
#include "tf_ops/core/simd_level.h"

namespace hvd_ctr {
namespace {

constexpr int32_t kUntouched = -77;

/// A matrix (rows, pitch) of which the first `columns` columns are features.
struct Matrix {
  int64_t rows, columns, pitch;
  std::vector<int64_t> ids;
  std::vector<int32_t> virtual_ids;

  Matrix(int64_t rows, int64_t columns, int64_t pitch, int64_t distinct, std::mt19937_64* random)
      : rows(rows), columns(columns), pitch(pitch), ids(rows * pitch), virtual_ids(rows * pitch, kUntouched) {
    for (int64_t& id : ids) id = static_cast<int64_t>((*random)() % distinct) - 3;
  }

  /// Column f of them, of this table, in place.
  IdColumn Column(int64_t f, int32_t table) {
    IdColumn column;
    column.ids = ids.data() + f;
    column.virtual_ids = virtual_ids.data() + f;
    column.count = rows;
    column.stride = pitch;
    column.table = table;
    column.has_padding = f % 3 == 1;
    column.padding_id = 5;
    return column;
  }
};

/// Columns of several matrices in turn, in groups of tables; then the same ids copied column by column.
class Layouts {
 public:
  explicit Layouts(uint64_t seed) : random_(seed) {
    for (int64_t m = 0; m < 4; ++m) {
      const int64_t columns = 1 + static_cast<int64_t>(random_() % 20);
      const int64_t rows = m == 2 ? 0 : static_cast<int64_t>(random_() % 300);
      matrices_.emplace_back(rows, columns, columns + static_cast<int64_t>(random_() % 3), m == 1 ? 40 : 5000, &random_);
    }
    int32_t table = 0;
    for (Matrix& matrix : matrices_) {
      for (int64_t f = 0; f < matrix.columns; ++f) {
        columns_.push_back(matrix.Column(f, table));
        if (random_() % 3 != 0) ++table;  // Some tables have several features.
      }
    }
    for (int32_t t = 0; t <= table; ++t) {
      IdRule rule;
      rule.rows = t % 4 == 0 ? -1 : 4000;
      rule.hash_ids = t % 4 == 2;
      rules_.push_back(rule);
    }
  }

  const std::vector<IdColumn>& columns() const { return columns_; }
  const std::vector<IdRule>& rules() const { return rules_; }

  /// The virtual ids that Run wrote, column by column; what is no feature must be untouched.
  std::vector<int32_t> Written() const {
    std::vector<int32_t> written;
    for (const IdColumn& column : columns_) {
      for (int64_t i = 0; i < column.count; ++i) written.push_back(column.virtual_ids[i * column.stride]);
    }
    for (const Matrix& matrix : matrices_) {
      for (int64_t i = 0; i < matrix.rows; ++i) {
        for (int64_t f = matrix.columns; f < matrix.pitch; ++f) EXPECT_EQ(matrix.virtual_ids[i * matrix.pitch + f], kUntouched);
      }
    }
    return written;
  }

 private:
  std::mt19937_64 random_;
  std::vector<Matrix> matrices_;
  std::vector<IdColumn> columns_;
  std::vector<IdRule> rules_;
};

struct Answer {
  DedupeResult result;
  std::vector<int32_t> virtual_ids;
};

Answer RunContiguous(const Layouts& layouts) {
  std::vector<std::vector<int64_t>> ids;
  std::vector<int32_t> virtual_ids;
  std::vector<IdColumn> columns = layouts.columns();
  int64_t total = 0;
  for (const IdColumn& column : columns) {
    ids.emplace_back();
    for (int64_t i = 0; i < column.count; ++i) ids.back().push_back(column.ids[i * column.stride]);
    total += column.count;
  }
  Answer answer;
  answer.virtual_ids.resize(static_cast<size_t>(total) + 1);
  int64_t at = 0;
  for (size_t c = 0; c < columns.size(); ++c) {
    columns[c].ids = ids[c].data();
    columns[c].virtual_ids = answer.virtual_ids.data() + at;
    columns[c].stride = 1;
    at += columns[c].count;
  }
  EXPECT_TRUE(IdDedupe().Run(columns, layouts.rules(), &answer.result).ok());
  answer.virtual_ids.pop_back();
  return answer;
}

void ExpectEqual(const Answer& answer, const Answer& expected, const std::string& where) {
  EXPECT_EQ(answer.virtual_ids, expected.virtual_ids) << where;
  EXPECT_EQ(answer.result.keys, expected.result.keys) << where;
  EXPECT_EQ(answer.result.counts, expected.result.counts) << where;
  EXPECT_EQ(answer.result.table_offsets, expected.result.table_offsets) << where;
  EXPECT_EQ(answer.result.invalid_counts, expected.result.invalid_counts) << where;
  EXPECT_EQ(answer.result.first_invalid.feature, expected.result.first_invalid.feature) << where;
  EXPECT_EQ(answer.result.first_invalid.id, expected.result.first_invalid.id) << where;
}

TEST(IdDedupePanelTest, RowMajorEqualsContiguousOnEveryLevel) {
  IdDedupe dedupe;
  int64_t invalid = 0;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    const Layouts layouts(seed);
    ForceSimdLevel(SimdLevel::kBaseline);
    const Answer expected = RunContiguous(layouts);
    for (const int64_t count : expected.result.invalid_counts) invalid += count;
    for (const SimdLevel level : {SimdLevel::kBaseline, SimdLevel::kAvx2, SimdLevel::kAvx512}) {
      ForceSimdLevel(level);
      Answer answer;
      ASSERT_TRUE(dedupe.Run(layouts.columns(), layouts.rules(), &answer.result).ok());
      answer.virtual_ids = layouts.Written();
      ExpectEqual(answer, expected, internal::StrCat("seed ", seed, " level ", SimdLevelName(ActiveSimdLevel())));
    }
  }
  ForceSimdLevel(ProcessSimdChoice().level);
  EXPECT_GT(invalid, 0);
}

}  // namespace
}  // namespace hvd_ctr
