#include "tf_ops/core/key_exchange.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>

namespace hvd_ctr {
namespace {

constexpr int64_t kMaxWords = std::numeric_limits<int32_t>::max();
constexpr int64_t kWordBytes = 8;
// Header of an error payload: magic, status code, text bytes, in 32-bit words. The magic reads as a float no row will ever hold
// at this place together with a valid code and length.
constexpr uint32_t kPayloadMagic = 0x68766445;  // "hvdE"
constexpr int64_t kPayloadHeaderFloats = 3;

int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool IsStatusCode(int64_t code) { return code >= 0 && code <= static_cast<int64_t>(StatusCode::kInternal); }

// The text cut to kMaxErrorTextBytes, not within a UTF-8 sequence.
std::string CutText(const std::string& text) {
  if (static_cast<int64_t>(text.size()) <= kMaxErrorTextBytes) return text;
  size_t size = kMaxErrorTextBytes;
  while (size > 0 && (static_cast<unsigned char>(text[size]) & 0xC0) == 0x80) --size;
  return text.substr(0, size);
}

// Keys of the tables that count, by the key counts of T tables.
int64_t CountedKeys(const int64_t* table_counts, Span<const uint8_t> counted) {
  int64_t keys = 0;
  for (int64_t t = 0; t < counted.size(); ++t) keys += counted[t] != 0 ? table_counts[t] : 0;
  return keys;
}

// Words that hold this many occurrence counts.
int64_t CountWords(int64_t keys) { return CeilDivide(keys * static_cast<int64_t>(sizeof(int32_t)), kWordBytes); }

// What stands in the way of sending the keys; OK when nothing does.
Status CheckSend(const BatchInfo& info, const PartitionResult& partition, const KeyCounts& counts, int32_t world_size) {
  if (!info.status.ok()) return info.status;
  const int64_t tables = static_cast<int64_t>(info.invalid_counts.size());
  if (static_cast<int64_t>(partition.splits.size()) != world_size ||
      static_cast<int64_t>(partition.owner_table_counts.size()) != world_size * tables) {
    return MakeStatus(StatusCode::kInternal, "PackKeys: the partition has ", partition.splits.size(), " splits and ",
                      partition.owner_table_counts.size(), " table counts; expected ", world_size, " and ", world_size * tables,
                      " for ", world_size, " ranks and ", tables, " tables");
  }
  const int64_t keys = std::accumulate(partition.splits.begin(), partition.splits.end(), int64_t{0});
  if (keys != static_cast<int64_t>(partition.grouped.size())) {
    return MakeStatus(StatusCode::kInternal, "PackKeys: the partition's splits tell ", keys, " keys, but it has ",
                      partition.grouped.size());
  }
  if (!counts.counted.empty() && (counts.counted.size() != tables || counts.counts.size() != keys)) {
    return MakeStatus(StatusCode::kInternal, "PackKeys: ", counts.counts.size(), " occurrence counts and ", counts.counted.size(),
                      " tables that may count; expected ", keys, " and ", tables);
  }
  for (int32_t w = 0; w < world_size; ++w) {
    if (partition.splits[w] + CountWords(partition.splits[w]) > kMaxWords - kKeyHeaderWords - 2 * tables) {
      return MakeStatus(StatusCode::kResourceExhausted, "PackKeys: ", partition.splits[w], " keys for rank ", w,
                        " exceed what one message can hold (", kMaxWords, " words); use a smaller batch");
    }
  }
  return Status::Ok();
}

int64_t* PutHeader(const BatchInfo& info, StatusCode code, int64_t text_bytes, int64_t* out) {
  out[0] = kKeyMessageMagic;
  out[1] = static_cast<int64_t>(code);
  out[2] = info.batch_rows;
  std::memcpy(&out[3], &info.weight_sum, sizeof(double));
  out[4] = info.first_invalid_feature;
  out[5] = info.first_invalid_id;
  out[6] = text_bytes;
  out[7] = static_cast<int64_t>(info.invalid_counts.size());
  return out + kKeyHeaderWords;
}

// The occurrences of one owner's keys, of which `key` is the first, as far as their tables count. Returns the end.
int64_t* PutKeyCounts(const KeyCounts& counts, int64_t key, const int64_t* table_counts, int64_t* out) {
  const int64_t words = CountWords(CountedKeys(table_counts, counts.counted));
  if (words == 0) return out;
  out[words - 1] = 0;  // The padding.
  char* bytes = reinterpret_cast<char*>(out);
  for (int64_t t = 0; t < counts.counted.size(); ++t) {
    const auto size = static_cast<size_t>(table_counts[t]) * sizeof(int32_t);
    if (counts.counted[t] != 0 && size > 0) {
      std::memcpy(bytes, counts.counts.data() + key, size);
      bytes += size;
    }
    key += table_counts[t];
  }
  return out + words;
}

// One peer's message and where it stands.
struct MessageView {
  const int64_t* words;
  int64_t size;
  int64_t rank;
};

template <typename... Args>
Status Corrupt(int64_t rank, const Args&... what) {
  return MakeStatus(StatusCode::kDataLoss, "key message from rank ", rank, ": ", what...,
                    "; ranks must run the same version and configuration");
}

Status CheckHeader(const MessageView& message, int32_t tables) {
  const int64_t* const words = message.words;
  const int64_t rank = message.rank;
  if (message.size < kKeyHeaderWords) {
    return Corrupt(rank, "it has ", message.size, " words; the header alone has ", kKeyHeaderWords);
  }
  if (words[0] != kKeyMessageMagic) return Corrupt(rank, "magic is ", words[0], "; expected ", kKeyMessageMagic);
  if (!IsStatusCode(words[1])) return Corrupt(rank, "status code is ", words[1], "; allowed: 0 .. 7");
  if (words[2] < kNoMoreBatches) return Corrupt(rank, "batch rows are ", words[2], "; allowed: >= ", kNoMoreBatches);
  if (words[4] < -1 || words[4] > std::numeric_limits<int32_t>::max()) {
    return Corrupt(rank, "first invalid feature is ", words[4], "; allowed: -1 .. 2^31-1");
  }
  const bool failed = words[1] != 0;
  if (words[6] < 0 || words[6] > kMaxErrorTextBytes || (!failed && words[6] != 0)) {
    return Corrupt(rank, "error text bytes are ", words[6], " with status code ", words[1], "; allowed: 0 .. ",
                   failed ? kMaxErrorTextBytes : 0);
  }
  if (words[7] != tables && !(failed && words[7] == 0)) {
    return Corrupt(rank, "number of tables is ", words[7], "; expected ", tables);
  }
  if ((message.size - kKeyHeaderWords) / 2 < words[7]) {
    return Corrupt(rank, "it has ", message.size, " words, too few for the counts of ", words[7], " tables");
  }
  return Status::Ok();
}

// Checks the counts of `sent_tables` tables against each other and the message size. No sum can overflow: a count is at most the
// words that are left.
Status CheckCounts(const MessageView& message, int64_t sent_tables, Span<const uint8_t> counted) {
  const int64_t* const counts = message.words + kKeyHeaderWords;
  const int64_t body = message.size - kKeyHeaderWords - 2 * sent_tables;
  const bool failed = message.words[1] != 0;
  int64_t left = failed ? 0 : body;
  for (int64_t t = 0; t < sent_tables; ++t) {
    if (counts[t] < 0 || counts[t] > left) {
      return Corrupt(message.rank, "key count of table ", t, " is ", counts[t], "; allowed: 0 .. ", left);
    }
    left -= counts[t];
    if (counts[sent_tables + t] < 0) {
      return Corrupt(message.rank, "invalid-id count of table ", t, " is ", counts[sent_tables + t], "; allowed: >= 0");
    }
  }
  if (!failed) left -= CountWords(CountedKeys(counts, counted));
  if (left != 0) {
    return Corrupt(message.rank, "it has ", std::abs(left), " words ", left > 0 ? "more" : "fewer", " than its key counts tell");
  }
  if (failed && body != CeilDivide(message.words[6], kWordBytes)) {
    return Corrupt(message.rank, "it has ", body, " words for an error text of ", message.words[6], " bytes");
  }
  return Status::Ok();
}

void ReadInfo(const MessageView& message, int64_t sent_tables, int32_t tables, BatchInfo* info) {
  const int64_t* const words = message.words;
  const int64_t* const invalid = words + kKeyHeaderWords + sent_tables;
  info->batch_rows = words[2];
  std::memcpy(&info->weight_sum, &words[3], sizeof(double));
  info->first_invalid_feature = static_cast<int32_t>(words[4]);
  info->first_invalid_id = words[5];
  info->invalid_counts.assign(static_cast<size_t>(tables), 0);
  std::copy(invalid, invalid + sent_tables, info->invalid_counts.begin());
  info->status = Status();
  if (words[1] == 0) return;
  const char* const text = reinterpret_cast<const char*>(words + kKeyHeaderWords + 2 * sent_tables);
  info->status = Status(static_cast<StatusCode>(words[1]), std::string(text, static_cast<size_t>(words[6])));
}

// Appends the occurrences of the message's keys; `from`: where the message has those of the tables that count.
Status ReadKeyCounts(const MessageView& message, const int64_t* table_counts, Span<const uint8_t> counted, const int64_t* from,
                     std::vector<int32_t>* counts) {
  const char* bytes = reinterpret_cast<const char*>(from);
  for (int64_t t = 0; t < counted.size(); ++t) {
    const size_t begin = counts->size();
    counts->resize(begin + static_cast<size_t>(table_counts[t]), 1);
    if (counted[t] == 0 || table_counts[t] == 0) continue;
    const size_t size = static_cast<size_t>(table_counts[t]) * sizeof(int32_t);
    std::memcpy(counts->data() + begin, bytes, size);
    bytes += size;
    const auto bad = std::find_if(counts->begin() + static_cast<int64_t>(begin), counts->end(), [](int32_t n) { return n < 1; });
    if (bad != counts->end()) return Corrupt(message.rank, "a key of table ", t, " occurs ", *bad, " times; allowed: >= 1");
  }
  return Status::Ok();
}

Status ReadMessage(const MessageView& message, int32_t tables, Span<const uint8_t> counted, ReceivedKeys* received,
                   PeerMessage* peer) {
  HVD_CTR_RETURN_IF_ERROR(CheckHeader(message, tables));
  const int64_t sent_tables = message.words[7];
  HVD_CTR_RETURN_IF_ERROR(CheckCounts(message, sent_tables, counted));
  ReadInfo(message, sent_tables, tables, &peer->info);
  peer->key_offset = static_cast<int64_t>(received->ids.size());
  peer->key_count = 0;
  if (!peer->info.status.ok()) return Status::Ok();
  const int64_t* const counts = message.words + kKeyHeaderWords;
  const int64_t* const keys = counts + 2 * sent_tables;
  const int64_t* const end = message.words + message.size - CountWords(CountedKeys(counts, counted));
  int64_t signs = 0;
  for (const int64_t* key = keys; key != end; ++key) signs |= *key;
  if (signs < 0) return Corrupt(message.rank, "it asks for a negative id");
  received->ids.insert(received->ids.end(), keys, end);
  for (int64_t t = 0; t < sent_tables; ++t) {
    received->tables.insert(received->tables.end(), static_cast<size_t>(counts[t]), static_cast<int32_t>(t));
  }
  peer->key_count = end - keys;
  return counted.empty() ? Status::Ok() : ReadKeyCounts(message, counts, counted, end, &received->counts);
}

Status ReadMessages(Span<const int64_t> words, Span<const int32_t> splits, int32_t tables, Span<const uint8_t> counted,
                    ReceivedKeys* received) {
  int64_t offset = 0;
  for (int64_t rank = 0; rank < splits.size(); ++rank) {
    if (splits[rank] < 0 || splits[rank] > words.size() - offset) {
      return Corrupt(rank, "its split is ", splits[rank], " words; allowed: 0 .. ", words.size() - offset);
    }
    const MessageView message{words.data() + offset, splits[rank], rank};
    HVD_CTR_RETURN_IF_ERROR(ReadMessage(message, tables, counted, received, &received->peers[rank]));
    offset += splits[rank];
  }
  if (offset != words.size()) {
    return MakeStatus(StatusCode::kDataLoss, "key exchange: the splits of ", splits.size(), " ranks cover ", offset, " of ",
                      words.size(), " words received");
  }
  return Status::Ok();
}

Status InvalidIdStatus(const BatchInfo& info, int64_t rank, int64_t table, const MixCacheOptions& options) {
  const TableOptions& rule = options.tables[table];
  const int64_t count = info.invalid_counts[table];
  const int64_t feature = info.first_invalid_feature;
  const bool known = feature >= 0 && feature < static_cast<int64_t>(options.features.size()) &&
                     feature < static_cast<int64_t>(options.feature_tables.size()) && options.feature_tables[feature] == table;
  const std::string where = known ? internal::StrCat("feature '", options.features[feature], "' (table '", rule.name, "'): id ",
                                                     info.first_invalid_id, " is invalid")
                                  : internal::StrCat("table '", rule.name, "': ids are invalid");
  const std::string allowed = rule.rows >= 0 ? internal::StrCat("0 .. ", rule.rows - 1) : std::string("0 .. 2^63-1");
  return MakeStatus(StatusCode::kOutOfRange, "rank ", rank, ": ", where, " (", count, count == 1 ? " invalid id" : " invalid ids",
                    " in its batch); allowed: ", allowed, "; fix the data, or set invalid_ids: skip on table '", rule.name, "'");
}

}  // namespace

std::vector<uint8_t> CountedTables(const std::vector<TableOptions>& tables) {
  std::vector<uint8_t> counted;
  for (const TableOptions& table : tables) counted.push_back(table.min_count > 1);
  if (std::count(counted.begin(), counted.end(), 1) == 0) counted.clear();
  return counted;
}

void PackKeys(const BatchInfo& info, const PartitionResult& partition, const KeyCounts& counts, int32_t world_size,
              std::vector<int64_t>* words, std::vector<int32_t>* splits) {
  const Status status = CheckSend(info, partition, counts, world_size);
  const std::string text = status.ok() ? std::string() : CutText(status.message());
  const int64_t text_bytes = static_cast<int64_t>(text.size());
  const int64_t tables = static_cast<int64_t>(info.invalid_counts.size());
  splits->resize(static_cast<size_t>(world_size));
  int64_t total = 0;
  const auto counts_of = [&](int32_t w) { return partition.owner_table_counts.data() + w * tables; };
  for (int32_t w = 0; w < world_size; ++w) {
    const int64_t body = status.ok() ? partition.splits[w] + CountWords(CountedKeys(counts_of(w), counts.counted))
                                     : CeilDivide(text_bytes, kWordBytes);
    (*splits)[w] = static_cast<int32_t>(kKeyHeaderWords + 2 * tables + body);
    total += (*splits)[w];
  }
  words->resize(static_cast<size_t>(total));
  int64_t* out = words->data();
  int64_t key = 0;
  for (int32_t w = 0; w < world_size; ++w) {
    int64_t* const end = out + (*splits)[w];
    out = PutHeader(info, status.code(), text_bytes, out);
    if (status.ok()) {
      out = std::copy_n(counts_of(w), tables, out);
    } else {
      out = std::fill_n(out, tables, int64_t{0});
    }
    out = std::copy(info.invalid_counts.begin(), info.invalid_counts.end(), out);
    if (status.ok()) {
      out = std::copy_n(partition.grouped.data() + key, partition.splits[w], out);
      out = PutKeyCounts(counts, key, counts_of(w), out);
      key += partition.splits[w];
    } else if (out != end) {
      end[-1] = 0;  // The padding of the last word.
      std::memcpy(out, text.data(), text.size());
      out = end;
    }
  }
}

Status UnpackKeys(Span<const int64_t> words, Span<const int32_t> splits, int32_t tables, Span<const uint8_t> counted,
                  ReceivedKeys* received) {
  received->ids.clear();
  received->tables.clear();
  received->counts.clear();
  received->peers.resize(static_cast<size_t>(splits.size()));
  const Status status = ReadMessages(words, splits, tables, counted, received);
  if (!status.ok()) {
    received->ids.clear();
    received->tables.clear();
    received->counts.clear();
    received->peers.clear();
  }
  return status;
}

Status AgreedStatus(const ReceivedKeys& received, const MixCacheOptions& options) {
  const int64_t ranks = static_cast<int64_t>(received.peers.size());
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const Status& status = received.peers[rank].info.status;
    if (!status.ok()) return MakeStatus(status.code(), "rank ", rank, ": ", status.message());
  }
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const BatchInfo& info = received.peers[rank].info;
    const size_t tables = std::min(info.invalid_counts.size(), options.tables.size());
    for (size_t table = 0; table < tables; ++table) {
      if (info.invalid_counts[table] == 0 || options.tables[table].invalid_ids == InvalidIdPolicy::kSkip) continue;
      return InvalidIdStatus(info, rank, static_cast<int64_t>(table), options);
    }
  }
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const double sum = received.peers[rank].info.weight_sum;
    if (std::isfinite(sum)) continue;
    return MakeStatus(StatusCode::kInvalidArgument, "rank ", rank, ": the sum of its sample weights is ", sum,
                      "; allowed: finite values; fix the sample weights");
  }
  return Status::Ok();
}

int64_t ErrorPayloadRows(const Status& status, int32_t dim, int64_t expected) {
  const int64_t text_floats = CeilDivide(static_cast<int64_t>(CutText(status.message()).size()), sizeof(float));
  const int64_t rows = CeilDivide(kPayloadHeaderFloats + text_floats, dim);
  return rows == expected ? rows + 1 : rows;
}

void EncodeErrorPayload(const Status& status, int32_t dim, int64_t payload_rows, float* rows) {
  const int64_t floats = payload_rows * dim;
  if (floats <= 0) return;
  std::memset(rows, 0, static_cast<size_t>(floats) * sizeof(float));
  if (floats < kPayloadHeaderFloats) return;  // Zeros: DecodeErrorPayload reports a torn exchange.
  const std::string text = CutText(status.message());
  const int64_t room = (floats - kPayloadHeaderFloats) * static_cast<int64_t>(sizeof(float));
  const int64_t bytes = std::min(static_cast<int64_t>(text.size()), room);
  const StatusCode code = status.ok() ? StatusCode::kInternal : status.code();
  const uint32_t header[kPayloadHeaderFloats] = {kPayloadMagic, static_cast<uint32_t>(code), static_cast<uint32_t>(bytes)};
  std::memcpy(rows, header, sizeof(header));
  std::memcpy(rows + kPayloadHeaderFloats, text.data(), static_cast<size_t>(bytes));
}

Status DecodeErrorPayload(const float* rows, int64_t payload_rows, int32_t dim, int32_t owner, int64_t expected) {
  const Status torn = MakeStatus(StatusCode::kDataLoss, "rank ", owner, " answered with ", payload_rows, " rows; expected ",
                                 expected, ", and they hold no error message: the row exchange is torn");
  if (rows == nullptr || payload_rows <= 0 || dim <= 0) return torn;
  // As bytes, without a product that could overflow: rows past the largest payload cannot matter.
  const int64_t floats = std::min(payload_rows, kPayloadHeaderFloats + kMaxErrorTextBytes) * dim;
  if (floats < kPayloadHeaderFloats) return torn;
  uint32_t header[kPayloadHeaderFloats];
  std::memcpy(header, rows, sizeof(header));
  const int64_t room = (floats - kPayloadHeaderFloats) * static_cast<int64_t>(sizeof(float));
  if (header[0] != kPayloadMagic || header[1] == 0 || !IsStatusCode(header[1]) || header[2] > kMaxErrorTextBytes ||
      header[2] > room) {
    return torn;
  }
  const char* const text = reinterpret_cast<const char*>(rows + kPayloadHeaderFloats);
  return Status(static_cast<StatusCode>(header[1]), std::string(text, header[2]));
}

}  // namespace hvd_ctr
