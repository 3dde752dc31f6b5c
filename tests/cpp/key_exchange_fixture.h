// What the tests of the key exchange share: batches of keys, and what an alltoall makes of the ranks' messages.
#ifndef HVD_CTR_TESTS_CPP_KEY_EXCHANGE_FIXTURE_H_
#define HVD_CTR_TESTS_CPP_KEY_EXCHANGE_FIXTURE_H_

#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tf_ops/core/key_exchange.h"

namespace hvd_ctr {

inline bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// Each rank's words and splits, and what an alltoall makes of them.
struct Exchange {
  std::vector<std::vector<int64_t>> words;
  std::vector<std::vector<int32_t>> splits;

  void Send(const BatchInfo& info, const PartitionResult& partition, int32_t world_size, const KeyCounts& counts = KeyCounts()) {
    words.emplace_back(3, -1);  // What an earlier batch left.
    splits.emplace_back();
    PackKeys(info, partition, counts, world_size, &words.back(), &splits.back());
  }

  void Receive(int32_t rank, std::vector<int64_t>* received, std::vector<int32_t>* received_splits) const {
    received->clear();
    received_splits->clear();
    for (size_t from = 0; from < words.size(); ++from) {
      int64_t begin = 0;
      for (int32_t w = 0; w < rank; ++w) begin += splits[from][w];
      received->insert(received->end(), words[from].begin() + begin, words[from].begin() + begin + splits[from][rank]);
      received_splits->push_back(splits[from][rank]);
    }
  }

  Status Unpack(int32_t rank, int32_t tables, ReceivedKeys* keys, Span<const uint8_t> counted = {}) const {
    std::vector<int64_t> received;
    std::vector<int32_t> received_splits;
    Receive(rank, &received, &received_splits);
    return UnpackKeys(received, received_splits, tables, counted, keys);
  }
};

inline PartitionResult Partition(const std::vector<int64_t>& keys, const std::vector<int64_t>& offsets, int32_t world_size) {
  PartitionResult partition;
  PartitionByOwner(keys, offsets, world_size, &partition);
  return partition;
}

inline BatchInfo Info(int64_t batch_rows, std::vector<int64_t> invalid_counts) {
  BatchInfo info;
  info.batch_rows = batch_rows;
  info.weight_sum = static_cast<double>(batch_rows) + 0.1;
  info.invalid_counts = std::move(invalid_counts);
  return info;
}

/// Unique random keys of a rank, by table.
inline void RandomKeys(std::mt19937_64* random, int32_t tables, std::vector<int64_t>* keys, std::vector<int64_t>* offsets) {
  keys->clear();
  offsets->assign(1, 0);
  for (int32_t t = 0; t < tables; ++t) {
    for (uint64_t n = (*random)() % 40; n > 0; --n) keys->push_back(static_cast<int64_t>((*random)() >> 1));
    offsets->push_back(static_cast<int64_t>(keys->size()));
  }
}

}  // namespace hvd_ctr

#endif  // HVD_CTR_TESTS_CPP_KEY_EXCHANGE_FIXTURE_H_
