#include "tf_ops/core/host_store.h"

#include <algorithm>

#include "tf_ops/core/disk_host_store.h"
#include "tf_ops/core/hash.h"
#include "tf_ops/core/row_math.h"

namespace hvd_ctr {
namespace {

bool PlainInFileNames(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '.' || c == '_' || c == '-';
}

// A name with other characters keeps the plain ones; its hash tells it from names that look the same then.
std::string FileStem(const MixCacheOptions& options) {
  std::string name = options.name;
  if (name.empty() || name[0] == '.' || !std::all_of(name.begin(), name.end(), PlainInFileNames)) {
    const uint64_t hash = HashBytes(name.data(), static_cast<int64_t>(name.size()));
    std::replace_if(name.begin(), name.end(), [](char c) { return !PlainInFileNames(c) || c == '.'; }, '_');
    name = internal::StrCat(name, "-", std::hex, hash);
  }
  return internal::StrCat(name, ".rank", options.rank, "of", options.world_size);
}

}  // namespace

HostStoreSpec MakeHostStoreSpec(const MixCacheOptions& options) {
  HostStoreSpec spec;
  spec.owner = internal::StrCat("mix_cache '", options.name, "' on rank ", options.rank);
  spec.file_stem = FileStem(options);
  spec.tables = static_cast<int32_t>(options.tables.size());
  int32_t state = 0;
  for (const TableOptions& table : options.tables) state = std::max(state, StateFloats(table.optimizer, options.dim));
  spec.record_floats = options.dim + state;
  return spec;
}

HostStorePlan PlanHostStore(const HostStoreSpec& spec, const HostOptions& host, Span<const int64_t> rows, int64_t appended) {
  if (host.kind == HostKind::kDisk) return PlanDiskHostStore(spec, host, rows, appended);
  return PlanRamHostStore(spec, host.ram_bytes, rows);
}

Result<std::unique_ptr<HostStore>> MakeHostStore(const MixCacheOptions& options) {
  const HostStoreSpec spec = MakeHostStoreSpec(options);
  if (options.host.kind == HostKind::kDisk) return MakeDiskHostStore(spec, options.host);
  return MakeRamHostStore(spec, options.host.ram_bytes);
}

}  // namespace hvd_ctr
