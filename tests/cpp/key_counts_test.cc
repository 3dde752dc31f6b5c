// Occurrences of ids in the key messages: those of tables that count, and nothing else.
#include <gtest/gtest.h>

#include "tests/cpp/key_exchange_fixture.h"

namespace hvd_ctr {
namespace {

int32_t CountOf(int64_t key, int32_t rank) { return static_cast<int32_t>(key % 1000) + 1 + rank; }

// Tables that count send one number per key, the others nothing; every key arrives with its own.
TEST(KeyCountsTest, OccurrencesArriveWithTheKeysOfTablesThatCount) {
  std::mt19937_64 random(2);
  const std::vector<uint8_t> all_counted[] = {{1, 0, 1, 0}, {0, 0, 0, 1}, {1, 1, 1, 1}, {0, 0, 0, 0}};
  for (const std::vector<uint8_t>& counted : all_counted) {
    for (const int32_t world_size : {1, 2, 3}) {
      Exchange exchange, plain;
      int64_t counts_sent = 0;
      for (int32_t rank = 0; rank < world_size; ++rank) {
        std::vector<int64_t> keys, offsets;
        RandomKeys(&random, 4, &keys, &offsets);
        const PartitionResult partition = Partition(keys, offsets, world_size);
        std::vector<int32_t> counts;
        for (const int64_t key : partition.grouped) counts.push_back(CountOf(key, rank));
        for (size_t t = 0; t < 4; ++t) counts_sent += counted[t] ? offsets[t + 1] - offsets[t] : 0;
        exchange.Send(Info(8, {0, 0, 0, 0}), partition, world_size, {counts, counted});
        plain.Send(Info(8, {0, 0, 0, 0}), partition, world_size);
      }
      size_t words = 0, plain_words = 0;
      for (int32_t rank = 0; rank < world_size; ++rank) {
        words += exchange.words[static_cast<size_t>(rank)].size();
        plain_words += plain.words[static_cast<size_t>(rank)].size();
        ReceivedKeys received, expected;
        const Status status = exchange.Unpack(rank, 4, &received, counted);
        ASSERT_TRUE(status.ok()) << status.message();
        ASSERT_TRUE(plain.Unpack(rank, 4, &expected).ok());
        ASSERT_EQ(received.ids, expected.ids);
        ASSERT_EQ(received.tables, expected.tables);
        ASSERT_TRUE(expected.counts.empty());
        ASSERT_EQ(received.counts.size(), received.ids.size());
        for (int32_t from = 0; from < world_size; ++from) {
          const PeerMessage& peer = received.peers[from];
          for (int64_t i = peer.key_offset; i < peer.key_offset + peer.key_count; ++i) {
            ASSERT_EQ(received.counts[i], counted[received.tables[i]] ? CountOf(received.ids[i], from) : 1);
          }
        }
      }
      EXPECT_GE(static_cast<int64_t>(2 * (words - plain_words)), counts_sent);
      EXPECT_LE(static_cast<int64_t>(2 * (words - plain_words)), counts_sent + world_size * world_size);
    }
  }
}

TEST(KeyCountsTest, OccurrencesThatDoNotFitAreErrors) {
  const PartitionResult partition = Partition({1, 2, 3}, {0, 2, 3}, 1);
  const std::vector<uint8_t> counted = {1, 0};
  std::vector<int32_t> counts = {5, 6, 7};
  Exchange exchange;
  exchange.Send(Info(3, {0, 0}), partition, 1, {counts, counted});
  ReceivedKeys received;
  const Status other_tables = exchange.Unpack(0, 2, &received);
  EXPECT_EQ(other_tables.code(), StatusCode::kDataLoss);
  EXPECT_TRUE(Has(other_tables.message(), "1 words more than its key counts tell")) << other_tables.message();
  const std::vector<uint8_t> both = {1, 1};
  const Status more_tables = exchange.Unpack(0, 2, &received, both);
  EXPECT_TRUE(Has(more_tables.message(), "1 words fewer than its key counts tell")) << more_tables.message();
  EXPECT_TRUE(received.ids.empty() && received.counts.empty());

  counts[1] = 0;
  Exchange never;
  never.Send(Info(3, {0, 0}), partition, 1, {counts, counted});
  EXPECT_TRUE(Has(never.Unpack(0, 2, &received, counted).message(), "a key of table 0 occurs 0 times"));
  counts.pop_back();
  Exchange short_counts;
  short_counts.Send(Info(3, {0, 0}), partition, 1, {counts, counted});
  ASSERT_TRUE(short_counts.Unpack(0, 2, &received, counted).ok());
  EXPECT_TRUE(Has(received.peers[0].info.status.message(), "PackKeys: 2 occurrence counts"));
}

}  // namespace
}  // namespace hvd_ctr
