// Hashes with one salt per purpose (DESIGN invariant: owner rank, directory, row initialisation and hash_ids use differently
// salted hashes, so that the keys one rank owns still spread over its directory). All are functions of values only: the same
// on every host, process and run.
#ifndef HVD_CTR_CORE_HASH_H_
#define HVD_CTR_CORE_HASH_H_

#include <cstdint>

#include "tf_ops/core/types.h"

#if defined(__CUDACC__)
#define HVD_CTR_HD __host__ __device__
#else
#define HVD_CTR_HD
#endif

namespace hvd_ctr {

constexpr uint64_t kOwnerSalt = 0x9ae16a3b2f90404fULL;
constexpr uint64_t kDirectorySalt = 0xc949d7c7509e6557ULL;
constexpr uint64_t kHostStoreSalt = 0xff51afd7ed558ccdULL;
constexpr uint64_t kInitialValueSalt = 0xd6e8feb86659fd93ULL;
constexpr uint64_t kHashIdsSalt = 0xa0761d6478bd642fULL;

/// SplitMix64's finaliser (Steele, Lea, Flood, OOPSLA 2014): a bijection of 64-bit values.
HVD_CTR_HD inline __attribute__((always_inline)) uint64_t Mix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

/// Hash of a key under a salt.
HVD_CTR_HD inline uint64_t HashKey(int32_t table, int64_t id, uint64_t salt) {
  return Mix64(static_cast<uint64_t>(id) ^ Mix64(salt + static_cast<uint64_t>(static_cast<uint32_t>(table))));
}

/// Maps a 64-bit hash evenly to [0, n) without division; n > 0.
HVD_CTR_HD inline uint64_t ReduceRange(uint64_t hash, uint64_t n) {
#if defined(__CUDA_ARCH__)
  return __umul64hi(hash, n);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(hash) * n) >> 64);
#endif
}

/// The rank that owns a key, 0 .. world_size-1.
HVD_CTR_HD inline int32_t OwnerOf(int32_t table, int64_t id, int32_t world_size) {
  return static_cast<int32_t>(ReduceRange(HashKey(table, id, kOwnerSalt), static_cast<uint64_t>(world_size)));
}

/// TableOptions::hash_ids: any 64-bit value (negative ones too) to [0, rows). Independent of the table.
HVD_CTR_HD inline int64_t HashToRange(int64_t id, int64_t rows) {
  return static_cast<int64_t>(ReduceRange(Mix64(static_cast<uint64_t>(id) ^ kHashIdsSalt), static_cast<uint64_t>(rows)));
}

/// 64-bit hash of a byte string (table names, string categories): FNV-1a followed by Mix64.
inline uint64_t HashBytes(const char* data, int64_t size, uint64_t seed = 0) {
  uint64_t h = 0xcbf29ce484222325ULL ^ Mix64(seed);
  for (int64_t i = 0; i < size; ++i) h = (h ^ static_cast<unsigned char>(data[i])) * 0x100000001b3ULL;
  return Mix64(h);
}

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_HASH_H_
