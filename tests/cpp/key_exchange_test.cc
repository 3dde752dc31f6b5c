// The wire format: what one rank packs every peer reads back, agreed errors, and no word sequence that could break the reader.
#include "tf_ops/core/key_exchange.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tests/cpp/key_exchange_fixture.h"
#include "tf_ops/core/hash.h"

namespace hvd_ctr {
namespace {

MixCacheOptions TwoTables() {
  MixCacheOptions options;
  options.tables.resize(2);
  options.tables[0].name = "user";
  options.tables[1].name = "item";
  options.tables[1].rows = 100;
  options.features = {"user", "item", "last_item"};
  options.feature_tables = {0, 1, 1};
  return options;
}

TEST(KeyExchangeTest, EveryPeerReadsItsKeysAndAllHeaders) {
  std::mt19937_64 random(1);
  for (const int32_t world_size : {1, 2, 3, 5}) {
    for (const int32_t tables : {1, 4}) {
      Exchange exchange;
      std::vector<std::vector<Key>> wanted(world_size);  // Per owner, in rank order.
      for (int32_t rank = 0; rank < world_size; ++rank) {
        std::vector<int64_t> keys, offsets;
        RandomKeys(&random, tables, &keys, &offsets);
        const PartitionResult partition = Partition(keys, offsets, world_size);
        exchange.Send(Info(rank == 0 ? kNoMoreBatches : rank * 10, std::vector<int64_t>(tables, rank)), partition, world_size);
        for (int32_t t = 0; t < tables; ++t) {
          for (int64_t i = offsets[t]; i < offsets[t + 1]; ++i) wanted[OwnerOf(t, keys[i], world_size)].push_back({keys[i], t});
        }
      }
      for (int32_t owner = 0; owner < world_size; ++owner) {
        ReceivedKeys received;
        const Status status = exchange.Unpack(owner, tables, &received);
        ASSERT_TRUE(status.ok()) << status.message();
        ASSERT_EQ(received.ids.size(), wanted[owner].size());
        ASSERT_EQ(received.tables.size(), wanted[owner].size());
        for (size_t i = 0; i < wanted[owner].size(); ++i) {
          EXPECT_EQ((Key{received.ids[i], received.tables[i]}), wanted[owner][i]);
        }
        int64_t offset = 0;
        for (int32_t rank = 0; rank < world_size; ++rank) {
          const PeerMessage& peer = received.peers[rank];
          EXPECT_EQ(peer.info.batch_rows, rank == 0 ? kNoMoreBatches : rank * 10);
          EXPECT_EQ(peer.info.weight_sum, static_cast<double>(peer.info.batch_rows) + 0.1);
          EXPECT_EQ(peer.info.invalid_counts, std::vector<int64_t>(tables, rank));
          EXPECT_EQ(peer.key_offset, offset);
          offset += peer.key_count;
        }
        EXPECT_EQ(offset, static_cast<int64_t>(received.ids.size()));
      }
    }
  }
}

TEST(KeyExchangeTest, RankWithoutDataStillSendsHeaders) {
  const PartitionResult partition = Partition({}, {0, 0, 0}, 3);
  std::vector<int64_t> words;
  std::vector<int32_t> splits;
  PackKeys(Info(0, {0, 0}), partition, KeyCounts(), 3, &words, &splits);
  EXPECT_EQ(splits, (std::vector<int32_t>{12, 12, 12}));
  EXPECT_EQ(words.size(), 36u);
}

TEST(KeyExchangeTest, LowestFailedRankIsTheVerdictOfAll) {
  const PartitionResult partition = Partition({1, 2, 3}, {0, 2, 3}, 3);
  Exchange exchange;
  exchange.Send(Info(1, {5, 5}), partition, 3);  // Invalid ids, but a failure goes first.
  for (const char* const text : {"train/part-3.tsv is cut short", "disk full"}) {
    BatchInfo failed = Info(0, {0, 0});
    failed.status = Status(Has(text, "disk") ? StatusCode::kInternal : StatusCode::kDataLoss, text);
    exchange.Send(failed, PartitionResult(), 3);
  }
  for (int32_t rank = 0; rank < 3; ++rank) {
    ReceivedKeys received;
    ASSERT_TRUE(exchange.Unpack(rank, 2, &received).ok());
    const Status status = AgreedStatus(received, TwoTables());
    EXPECT_EQ(status.code(), StatusCode::kDataLoss);
    EXPECT_EQ(status.message(), "rank 1: train/part-3.tsv is cut short");
    EXPECT_EQ(received.peers[1].key_count, 0);
    EXPECT_EQ(received.peers[2].info.status.message(), "disk full");
  }
}

TEST(KeyExchangeTest, ErrorTextsOfAllLengthsArrive) {
  for (size_t size = 0; size < 40; ++size) {
    BatchInfo failed = Info(0, {0});
    failed.status = Status(StatusCode::kNotFound, std::string(size, 'x'));
    Exchange exchange;
    exchange.Send(failed, PartitionResult(), 1);
    ReceivedKeys received;
    ASSERT_TRUE(exchange.Unpack(0, 1, &received).ok()) << size;
    EXPECT_EQ(received.peers[0].info.status.code(), StatusCode::kNotFound);
    EXPECT_EQ(received.peers[0].info.status.message(), std::string(size, 'x'));
  }
}

TEST(KeyExchangeTest, LongErrorTextIsCutBetweenCharacters) {
  std::string text(kMaxErrorTextBytes - 1, 'a');
  text += "\xc3\xa4\xc3\xa4";  // Two-byte characters across the limit.
  BatchInfo failed = Info(0, {0});
  failed.status = Status(StatusCode::kInternal, text);
  Exchange exchange;
  exchange.Send(failed, PartitionResult(), 1);
  ReceivedKeys received;
  ASSERT_TRUE(exchange.Unpack(0, 1, &received).ok());
  EXPECT_EQ(received.peers[0].info.status.message(), std::string(kMaxErrorTextBytes - 1, 'a'));
}

TEST(KeyExchangeTest, ErrorOfARankThatKnowsNoTablesArrives) {
  BatchInfo failed;
  failed.status = Status(StatusCode::kInvalidArgument, "bad configuration");
  Exchange exchange;
  exchange.Send(failed, PartitionResult(), 1);
  ReceivedKeys received;
  ASSERT_TRUE(exchange.Unpack(0, 2, &received).ok());
  EXPECT_EQ(received.peers[0].info.invalid_counts, (std::vector<int64_t>{0, 0}));
  EXPECT_EQ(AgreedStatus(received, TwoTables()).message(), "rank 0: bad configuration");
}

TEST(KeyExchangeTest, PartitionThatDoesNotFitBecomesAnErrorOfAll) {
  const PartitionResult good = Partition({1, 2, 3}, {0, 3}, 2);
  PartitionResult short_counts = good, short_keys = good, short_splits = good;
  short_counts.owner_table_counts.pop_back();
  short_keys.grouped.pop_back();
  short_splits.splits.pop_back();
  for (const PartitionResult& partition : {short_counts, short_keys, short_splits}) {
    Exchange exchange;
    exchange.Send(Info(3, {0}), partition, 2);
    ReceivedKeys received;
    ASSERT_TRUE(exchange.Unpack(1, 1, &received).ok());
    EXPECT_EQ(received.peers[0].info.status.code(), StatusCode::kInternal);
    EXPECT_TRUE(Has(received.peers[0].info.status.message(), "PackKeys: the partition"));
  }
}

ReceivedKeys Peers(std::vector<BatchInfo> infos) {
  ReceivedKeys received;
  for (BatchInfo& info : infos) {
    received.peers.emplace_back();
    received.peers.back().info = std::move(info);
  }
  return received;
}

TEST(AgreedStatusTest, InvalidIdsNameRankFeatureTableIdRangeAndCure) {
  BatchInfo bad = Info(4, {0, 2});
  bad.first_invalid_feature = 1;
  bad.first_invalid_id = -1;
  const Status status = AgreedStatus(Peers({Info(4, {0, 0}), bad}), TwoTables());
  EXPECT_EQ(status.code(), StatusCode::kOutOfRange);
  EXPECT_EQ(
      status.message(),
      "rank 1: feature 'item' (table 'item'): id -1 is invalid (2 invalid ids in its batch); allowed: 0 .. 99; fix the data, "
      "or set invalid_ids: skip on table 'item'");
}

TEST(AgreedStatusTest, UnboundedTable) {
  BatchInfo bad = Info(4, {1, 0});
  bad.first_invalid_feature = 0;
  bad.first_invalid_id = -7;
  EXPECT_EQ(
      AgreedStatus(Peers({bad}), TwoTables()).message(),
      "rank 0: feature 'user' (table 'user'): id -7 is invalid (1 invalid id in its batch); allowed: 0 .. 2^63-1; fix the data, "
      "or set invalid_ids: skip on table 'user'");
}

TEST(AgreedStatusTest, SkippedTablesAreFineAndNeverTheNamedOnes) {
  MixCacheOptions options = TwoTables();
  options.tables[0].invalid_ids = InvalidIdPolicy::kSkip;
  BatchInfo skipped = Info(4, {3, 0});
  skipped.first_invalid_feature = 0;
  skipped.first_invalid_id = -7;
  EXPECT_TRUE(AgreedStatus(Peers({skipped}), options).ok());
  // The rank's first invalid id is of the table that skips; the other one fails, without naming that id.
  skipped.invalid_counts[1] = 2;
  EXPECT_EQ(
      AgreedStatus(Peers({skipped}), options).message(),
      "rank 0: table 'item': ids are invalid (2 invalid ids in its batch); allowed: 0 .. 99; fix the data, or set invalid_ids: "
      "skip on table 'item'");
}

TEST(AgreedStatusTest, FeatureOutOfRangeIsNotFollowed) {
  BatchInfo bad = Info(4, {0, 1});
  bad.first_invalid_feature = std::numeric_limits<int32_t>::max();
  EXPECT_TRUE(Has(AgreedStatus(Peers({bad}), TwoTables()).message(), "rank 0: table 'item'"));
}

TEST(AgreedStatusTest, WeightSumMustBeFinite) {
  for (const double sum : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
    BatchInfo bad = Info(4, {0, 0});
    bad.weight_sum = sum;
    const Status status = AgreedStatus(Peers({Info(4, {0, 0}), bad}), TwoTables());
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_TRUE(Has(status.message(), "rank 1: the sum of its sample weights is")) << status.message();
  }
  EXPECT_TRUE(AgreedStatus(Peers({Info(4, {0, 0})}), TwoTables()).ok());
}

// Two good messages for a receiver with 2 tables, to be damaged; rank 1's begins at `second`.
struct Damaged {
  std::vector<int64_t> words;
  std::vector<int32_t> splits;
  int64_t second = 0;

  explicit Damaged(Span<const uint8_t> counted = {}) {
    Exchange exchange;
    const std::vector<int32_t> counts(8, 3);
    for (int rank = 0; rank < 2; ++rank) {
      const PartitionResult partition = Partition({1, 2, 3, 4, 5, 6, 7, 8}, {0, 5, 8}, 2);
      exchange.Send(Info(8, {1, 1}), partition, 2, {counts, counted});
    }
    exchange.Receive(1, &words, &splits);
    second = splits[0];
  }

  std::string Error() const {
    ReceivedKeys received;
    const Status status = UnpackKeys(words, splits, 2, {}, &received);
    EXPECT_EQ(status.code(), StatusCode::kDataLoss);
    EXPECT_TRUE(received.ids.empty() && received.tables.empty() && received.peers.empty());
    return status.message();
  }
};

TEST(UnpackKeysTest, NamesRankAndField) {
  const struct {
    int64_t word;
    int64_t value;
    const char* message;
  } cases[] = {
      {0, 7, "magic is 7"},
      {1, 8, "status code is 8"},
      {1, -1, "status code is -1"},
      {2, -5, "batch rows are -5"},
      {4, -2, "first invalid feature is -2"},
      {4, int64_t{1} << 31, "first invalid feature is 2147483648"},
      {6, 1, "error text bytes are 1"},
      {6, -1, "error text bytes are -1"},
      {7, 3, "number of tables is 3; expected 2"},
      {7, std::numeric_limits<int64_t>::max(), "number of tables is"},
      {8, -1, "key count of table 0 is -1"},
      {8, 1000, "key count of table 0 is 1000"},
      {8, std::numeric_limits<int64_t>::max(), "key count of table 0"},
      {9, std::numeric_limits<int64_t>::max(), "key count of table 1"},
      {9, 0, "words more than its key counts tell"},
      {10, -1, "invalid-id count of table 0 is -1"},
      {12, -1, "asks for a negative id"},
      {1, 3, "key count of table 0"},  // A failure that carries keys.
  };
  for (const auto& c : cases) {
    Damaged damaged;
    damaged.words[damaged.second + c.word] = c.value;
    const std::string message = damaged.Error();
    EXPECT_TRUE(Has(message, "rank 1")) << message;
    EXPECT_TRUE(Has(message, c.message)) << message << " lacks " << c.message;
  }
}

TEST(UnpackKeysTest, SplitsMustCoverTheWords) {
  for (const int32_t split : {-1, 0, 7, 10, 11, 1000, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()}) {
    Damaged damaged;
    damaged.splits[1] = split;
    EXPECT_TRUE(Has(damaged.Error(), "rank 1")) << split;
  }
  Damaged longer;
  longer.words.push_back(0);
  EXPECT_TRUE(Has(longer.Error(), "words received"));
  Damaged lost;
  lost.splits.pop_back();
  EXPECT_TRUE(Has(lost.Error(), "words received"));
}

TEST(UnpackKeysTest, ErrorTextMustHaveItsWords) {
  BatchInfo failed = Info(0, {0, 0});
  failed.status = Status(StatusCode::kInternal, "twelve bytes");
  Exchange exchange;
  exchange.Send(failed, PartitionResult(), 1);
  for (const int64_t bytes :
       {int64_t{0}, int64_t{8}, int64_t{17}, kMaxErrorTextBytes, kMaxErrorTextBytes + 1, int64_t{1} << 62}) {
    Exchange damaged = exchange;
    damaged.words[0][6] = bytes;
    ReceivedKeys received;
    EXPECT_EQ(damaged.Unpack(0, 2, &received).code(), StatusCode::kDataLoss) << bytes;
  }
}

// Random damage must end in OK or DATA_LOSS, never in a read outside the buffers (for the sanitizers) or an inconsistent result.
TEST(UnpackKeysTest, RandomDamageIsHarmless) {
  std::mt19937_64 random(99);
  const int64_t values[] = {0,
                            1,
                            2,
                            -1,
                            8,
                            1 << 20,
                            int64_t{1} << 31,
                            int64_t{1} << 62,
                            std::numeric_limits<int64_t>::max(),
                            std::numeric_limits<int64_t>::min()};
  int refused = 0;
  for (int round = 0; round < 20000; ++round) {
    const std::vector<uint8_t> counted = {1, 0};
    const bool counts = round % 2 == 0;
    Damaged damaged(counts ? Span<const uint8_t>(counted) : Span<const uint8_t>());
    for (uint64_t hits = 1 + random() % 4; hits > 0; --hits) {
      // An exact copy, so that the end of the words is the end of an allocation.
      int64_t& word = damaged.words[random() % damaged.words.size()];
      word = random() % 2 == 0 ? values[random() % 10] : word ^ (int64_t{1} << (random() % 63));
      if (random() % 4 == 0) damaged.splits[random() % 2] = static_cast<int32_t>(random() % 40) - 3;
      if (random() % 8 == 0) damaged.words.resize(1 + random() % damaged.words.size());
    }
    const std::vector<int64_t> exact(damaged.words);
    ReceivedKeys received;
    const Status status =
        UnpackKeys(exact, damaged.splits, 2, counts ? Span<const uint8_t>(counted) : Span<const uint8_t>(), &received);
    if (!status.ok()) {
      ASSERT_EQ(status.code(), StatusCode::kDataLoss);
      ++refused;
      continue;
    }
    ASSERT_EQ(received.ids.size(), received.tables.size());
    ASSERT_EQ(received.counts.size(), counts ? received.ids.size() : 0);
    for (const int32_t table : received.tables) ASSERT_TRUE(table >= 0 && table < 2);
    (void)AgreedStatus(received, TwoTables());
  }
  EXPECT_GT(refused, 10000);
}

TEST(ErrorPayloadTest, RoundTripsWithACountThatTellsIt) {
  for (const int32_t dim : {1, 2, 3, 4, 16, 128, 1024}) {
    for (const size_t size : {0, 1, 3, 4, 5, 100, 4096}) {
      const Status sent(StatusCode::kResourceExhausted, std::string(size, 'q'));
      const int64_t usual = ErrorPayloadRows(sent, dim, -1);
      for (const int64_t expected : {int64_t{0}, usual - 1, usual, usual + 1, int64_t{1} << 40}) {
        const int64_t rows = ErrorPayloadRows(sent, dim, expected);
        ASSERT_GT(rows, 0);
        ASSERT_NE(rows, expected);
        std::vector<float> payload(rows * dim, 1.0f);
        EncodeErrorPayload(sent, dim, rows, payload.data());
        const Status got = DecodeErrorPayload(payload.data(), rows, dim, 3, expected);
        ASSERT_EQ(got.code(), StatusCode::kResourceExhausted) << dim << " " << size;
        ASSERT_EQ(got.message(), sent.message());
      }
    }
  }
}

TEST(ErrorPayloadTest, AllBytesAndLongTextsSurvive) {
  std::string bytes;
  for (int c = 0; c < 256; ++c) bytes += static_cast<char>(c);  // NaN patterns among the floats.
  const std::string long_text = std::string(10000, 'z');
  for (const std::string& text : {bytes, long_text}) {
    const Status sent(StatusCode::kInternal, text);
    const int64_t rows = ErrorPayloadRows(sent, 16, 0);
    std::vector<float> payload(rows * 16);
    EncodeErrorPayload(sent, 16, rows, payload.data());
    EXPECT_EQ(DecodeErrorPayload(payload.data(), rows, 16, 0, 0).message(), text.substr(0, kMaxErrorTextBytes));
  }
}

TEST(ErrorPayloadTest, OkStatusStillFailsTheReceiver) {
  const int64_t rows = ErrorPayloadRows(Status(), 4, 0);
  std::vector<float> payload(rows * 4);
  EncodeErrorPayload(Status(), 4, rows, payload.data());
  EXPECT_EQ(DecodeErrorPayload(payload.data(), rows, 4, 0, 0).code(), StatusCode::kInternal);
}

TEST(ErrorPayloadTest, TooFewRowsCutTheText) {
  const Status sent(StatusCode::kInternal, "0123456789");
  std::vector<float> payload(4);
  EncodeErrorPayload(sent, 1, 4, payload.data());
  EXPECT_EQ(DecodeErrorPayload(payload.data(), 4, 1, 0, 9).message(), "0123");
  EncodeErrorPayload(sent, 1, 2, payload.data());
  EXPECT_EQ(DecodeErrorPayload(payload.data(), 2, 1, 0, 9).code(), StatusCode::kDataLoss);
}

TEST(ErrorPayloadTest, OrdinaryRowsAreATornExchange) {
  const std::vector<float> rows(64, 0.5f);
  const Status status = DecodeErrorPayload(rows.data(), 4, 16, 2, 7);
  EXPECT_EQ(status.code(), StatusCode::kDataLoss);
  EXPECT_TRUE(Has(status.message(), "rank 2 answered with 4 rows; expected 7")) << status.message();
  EXPECT_EQ(DecodeErrorPayload(nullptr, 0, 16, 2, 7).code(), StatusCode::kDataLoss);
  EXPECT_EQ(DecodeErrorPayload(rows.data(), 1, 1, 2, 7).code(), StatusCode::kDataLoss);
}

TEST(ErrorPayloadTest, RandomDamageIsHarmless) {
  std::mt19937_64 random(7);
  const Status sent(StatusCode::kResourceExhausted, "the cache is too small");
  int refused = 0;
  for (int round = 0; round < 5000; ++round) {
    std::vector<float> payload(ErrorPayloadRows(sent, 1, 0));
    EncodeErrorPayload(sent, 1, static_cast<int64_t>(payload.size()), payload.data());
    uint32_t word = 0;
    const size_t at = random() % payload.size();
    std::memcpy(&word, &payload[at], sizeof(word));
    word ^= static_cast<uint32_t>(random()) | 1;
    std::memcpy(&payload[at], &word, sizeof(word));
    const std::vector<float> exact(payload.begin(), payload.begin() + random() % (payload.size() + 1));
    const Status status = DecodeErrorPayload(exact.data(), static_cast<int64_t>(exact.size()), 1, 0, 1000);
    EXPECT_FALSE(status.ok());
    refused += status.code() == StatusCode::kDataLoss;
  }
  EXPECT_GT(refused, 2000);
}

}  // namespace
}  // namespace hvd_ctr
