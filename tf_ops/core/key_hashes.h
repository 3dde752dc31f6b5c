// Hashes of many keys of one table at a time (hash.h), on vectors where there are any.
#ifndef HVD_CTR_CORE_KEY_HASHES_H_
#define HVD_CTR_CORE_KEY_HASHES_H_

#include <cstdint>

namespace hvd_ctr {

/// hashes[i] = HashKey(table, ids[i], salt), n of them.
void HashKeys(int32_t table, const int64_t* ids, int64_t n, uint64_t salt, uint64_t* hashes);

/// owners[i] = OwnerOf(table, ids[i], world_size), n of them.
void OwnersOfKeys(int32_t table, const int64_t* ids, int64_t n, int32_t world_size, int32_t* owners);

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_KEY_HASHES_H_
