// The disk tier: random reads of rows that are only in the file, and the log that evicted rows are appended to.
#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/stages/harness.h"
#include "benchmarks/stages/stages.h"
#include "tf_ops/core/disk_host_store.h"

namespace hvd_ctr::bench {
namespace {

void DiskStage(int repeats, const std::string& folder, int32_t record_floats) {
  constexpr int64_t kChunk = 16384, kRead = 4096;
  HostStoreSpec spec;
  spec.record_floats = record_floats;
  spec.file_stem = "stages";
  HostOptions host;
  host.kind = HostKind::kDisk;
  host.path = folder;
  const int64_t rows = (int64_t{1} << 30) / (record_floats * static_cast<int64_t>(sizeof(float)));  // A file of 1 GB.
  host.ram_bytes = rows * 40 + (int64_t{48} << 20);
  auto made = MakeDiskHostStore(spec, host);
  Check(made.status());
  HostStore* store = made.value().get();
  InlineRunner runner;
  std::vector<float> records(static_cast<size_t>(kChunk * record_floats), 1.0f);
  const std::string variant = internal::StrCat(record_floats * sizeof(float), "-byte rows");

  // One pass fills the file; each sweep is a share of it, so that memory is full and rows go to the log as fast as they come.
  std::vector<Key> keys;
  Series written;
  const int64_t per_sweep = rows / (repeats + 2) / kChunk * kChunk;
  for (int64_t begin = 0, sweep = 0; begin + per_sweep <= rows; begin += per_sweep, ++sweep) {
    const int64_t before = store->disk().rows_written;
    const double started = SecondsNow();
    for (int64_t chunk = begin; chunk < begin + per_sweep; chunk += kChunk) {
      keys.clear();
      for (int64_t id = chunk; id < chunk + kChunk; ++id) keys.push_back({id, 0});
      Check(store->Store(keys, records.data(), &runner));
    }
    const double rate = static_cast<double>(store->disk().rows_written - before) / (SecondsNow() - started);
    if (sweep > 1) written.Add(rate);
  }
  Report("disk eviction", variant, "rows/s", written);

  const int64_t stored = store->row_count();
  std::mt19937_64 random(3);
  std::vector<uint8_t> found(static_cast<size_t>(kRead));
  Series read;
  for (int sweep = 0; sweep <= repeats; ++sweep) {
    keys.clear();
    std::vector<int64_t> ids;
    while (static_cast<int64_t>(ids.size()) < kRead)
      ids.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(stored)));
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    std::shuffle(ids.begin(), ids.end(), random);
    for (const int64_t id : ids) keys.push_back({id, 0});
    const int64_t before = store->disk().rows_read;
    const double started = SecondsNow();
    Check(store->Load(keys, records.data(), found.data(), &runner));
    const double rate = static_cast<double>(store->disk().rows_read - before) / (SecondsNow() - started);
    if (sweep > 0) read.Add(rate);
  }
  Report("disk reads", variant, "rows/s", read);
}

}  // namespace

void RunDiskStages(int repeats, const std::string& folder) {
  for (const int32_t record_floats : {32, 128}) DiskStage(repeats, folder, record_floats);
}

}  // namespace hvd_ctr::bench
