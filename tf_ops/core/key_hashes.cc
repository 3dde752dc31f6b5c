#include "tf_ops/core/key_hashes.h"

#include "tf_ops/core/hash.h"
#include "tf_ops/core/simd_level.h"

namespace hvd_ctr {
namespace {

// HashKey with the table's part computed once.
struct TableHash {
  TableHash(int32_t table, uint64_t salt) : mixed(Mix64(salt + static_cast<uint64_t>(static_cast<uint32_t>(table)))) {}
  uint64_t mixed;
};

template <SimdLevel kLevel>
HVD_CTR_SIMD_BODY void HashRunBody(const int64_t* ids, int64_t n, TableHash table, uint64_t* hashes) {
  for (int64_t i = 0; i < n; ++i) hashes[i] = Mix64(static_cast<uint64_t>(ids[i]) ^ table.mixed);
}

// ReduceRange for n < 2^32 without a product of 128 bits: hash * n = (high * n) * 2^32 + low * n.
template <SimdLevel kLevel>
HVD_CTR_SIMD_BODY void OwnerRunBody(const int64_t* ids, int64_t n, TableHash table, uint32_t world_size, int32_t* owners) {
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t hash = Mix64(static_cast<uint64_t>(ids[i]) ^ table.mixed);
    const uint64_t low = (hash & 0xffffffffu) * world_size;
    owners[i] = static_cast<int32_t>(((hash >> 32) * world_size + (low >> 32)) >> 32);
  }
}

HVD_CTR_SIMD_KERNEL(void, HashRun, (const int64_t* ids, int64_t n, TableHash table, uint64_t* hashes), (ids, n, table, hashes))
HVD_CTR_SIMD_KERNEL(void, OwnerRun, (const int64_t* ids, int64_t n, TableHash table, uint32_t world_size, int32_t* owners),
                    (ids, n, table, world_size, owners))

}  // namespace

void HashKeys(int32_t table, const int64_t* ids, int64_t n, uint64_t salt, uint64_t* hashes) {
  HashRun(ids, n, TableHash(table, salt), hashes);
}

void OwnersOfKeys(int32_t table, const int64_t* ids, int64_t n, int32_t world_size, int32_t* owners) {
  OwnerRun(ids, n, TableHash(table, kOwnerSalt), static_cast<uint32_t>(world_size), owners);
}

}  // namespace hvd_ctr
