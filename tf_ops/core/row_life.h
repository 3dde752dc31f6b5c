// RowLife: when rows of a table come into being and when they end, for the tables that say so (TableOptions: min_count,
// max_idle_steps, max_rows). It knows ids, occurrences and steps, never values; MixCache carries out what it decides.
//
//   life.Decide(batch, admitted.data());          // Apply: which keys of the batch are trained; changes nothing
//   life.Count(batch, step);                      // ... once the rows are updated
//   life.Ages(table, step, bins);                 // a sweep: rows by age, to be summed over the ranks
//   life.Select(table, step, summed, &ended);     // the rows that end; MixCache deletes them, then
//   life.Erase(ended.idle);
//
// An id is known from its first occurrence on, with the number of its occurrences and the step of the last one. It is a row when
// it has occurred min_count times; before that it waits. An id that is erased is as one never seen.
//
// Invariant: all decisions are functions of the global batches alone: of occurrences summed over the ranks, steps, and row ages
// summed over the ranks; never of the cache or of the order in which ids are stored. Tables without these options cost nothing.
//
// Memory: 36 to 72 bytes per known id, while it grows once more half of that. It is not given back when ids end, but used again.
// Not thread-safe.
#ifndef HVD_CTR_CORE_ROW_LIFE_H_
#define HVD_CTR_CORE_ROW_LIFE_H_

#include <cstdint>
#include <vector>

#include "tf_ops/core/key_map.h"
#include "tf_ops/core/options.h"
#include "tf_ops/core/types.h"

namespace hvd_ctr {

/// Bins of row ages: single steps up to 511, then 256 bins for each doubling. Ages of 2^40 steps and more share the last one.
constexpr int64_t kAgeBins = 33 * 256;
/// Bin of an age in steps, >= 0; never falls with the age.
int64_t AgeBin(int64_t age);

class RowLife {
 public:
  /// Occurrences beyond this are not counted.
  static constexpr int64_t kMostCount = kMostMinCount;

  /// A working key of a batch, in a table that is tracked.
  struct Occurrence {
    Key key;
    uint64_t hash = 0;  ///< SlotDirectory::Hash of the key.
    int64_t count = 1;  ///< In the global batch.
    int32_t k = 0;      ///< Its number among the working keys.
  };

  /// What is known of an id; count 0: nothing.
  struct Id {
    int64_t count = 0;
    int64_t last_step = 0;
  };

  /// Rows that end in a sweep.
  struct Ended {
    std::vector<Key> idle;    ///< Not trained for more than max_idle_steps.
    std::vector<Key> excess;  ///< The longest untrained of those that exceed max_rows.
  };

  explicit RowLife(const std::vector<TableOptions>& tables);

  /// No table has any of the options.
  bool empty() const { return empty_; }
  /// The table has one of the options.
  bool tracks(int32_t table) const { return tables_[static_cast<size_t>(table)].tracked; }
  /// A sweep of this table is due after this step.
  bool due(int32_t table, int64_t step) const;

  /// admitted (n): 1 where the key's row is trained by a batch with these occurrences. Makes room for all of them, so that Count
  /// cannot fail; may throw std::bad_alloc. Changes nothing.
  void Decide(Span<const Occurrence> batch, uint8_t* admitted);
  /// Counts the batch, trained at this step. Precondition: Decide.
  void Count(Span<const Occurrence> batch, int64_t step);

  /// Adds the rows of the table to bins (kAgeBins) by age, without those that are idle for too long.
  void Ages(int32_t table, int64_t step, Span<int64_t> bins) const;
  /// Fills *ended; forgets the ids that wait and did not occur for more than max_idle_steps. ages (kAgeBins): sums of Ages over
  /// all ranks, not looked at without max_rows. Whole bins end, the oldest first, until at most max_rows rows remain on all
  /// ranks.
  void Select(int32_t table, int64_t step, Span<const int64_t> ages, Ended* ended);
  void Erase(Span<const Key> keys);

  Id Find(const Key& key) const;
  /// For restoring. A row's count is raised to min_count, that of an id without a row lowered below it (0: not known).
  void Set(const Key& key, Id id, bool has_row);
  /// Ids of the table that wait, in no particular order: those in the next `entries` entries from *cursor (0 at the start) on, so
  /// at most so many; *cursor is set to where to go on, or -1 at the end. The table must not change meanwhile.
  void ScanWaiting(int32_t table, int64_t* cursor, int64_t entries, std::vector<int64_t>* ids, std::vector<Id>* found) const;

  int64_t rows(int32_t table) const { return tables_[static_cast<size_t>(table)].rows; }
  int64_t waiting(int32_t table) const {
    return tables_[static_cast<size_t>(table)].ids.size() - tables_[static_cast<size_t>(table)].rows;
  }
  int64_t allocated_bytes() const;

 private:
  struct Table {
    bool tracked = false;
    int64_t min_count = 1;
    int64_t max_idle_steps = 0;
    int64_t max_rows = 0;
    int64_t sweep_every_steps = 1;
    int64_t rows = 0;
    KeyMap ids;  // Value: last step and count, see Pack. Never 0.
  };

  static constexpr int kCountBits = 24;
  static constexpr int64_t kMostStep = (int64_t{1} << (64 - kCountBits)) - 1;

  static uint64_t Pack(Id id);
  static Id Unpack(uint64_t value);
  static int64_t Age(uint64_t value, int64_t step);
  static bool Idle(const Table& table, uint64_t value, int64_t step);

  std::vector<Table> tables_;
  bool empty_ = true;
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_ROW_LIFE_H_
