// The wire format of the key exchange and of error payloads in the row exchange: plain int64 / float buffers that an alltoall
// moves.
//
// Key message from one rank to one peer (int64 words):
//   [0] kKeyMessageMagic   [1] status code (StatusCode of the sender)   [2] batch rows B, or kNoMoreBatches   [3] sample-weight
//   sum (bits of a double) [4] first invalid feature (-1: none)   [5] first invalid id   [6] error text bytes (0: none) [7]
//   number of tables T then T key counts, T invalid-id counts, then either the keys (by table) or, when the status is not OK, the
//   error text padded to 8-byte words.
//   Last, for the keys of tables that count their ids (all ranks know which, by configuration), how often each occurs in the
//   sender's batch: int32 in the order of the keys, padded to 8-byte words. Without such tables nothing is added.
// Every rank sends a header to every peer in every step, so batch size, weight and errors are agreed on without a collective of
// their own, and a rank without data or with an error never leaves the others waiting.
//
// Row-exchange errors: an owner that cannot serve its rows (cache too small, disk error) answers with a number of rows that
// differs from what was asked for; the rows hold the Status. Receivers detect the mismatch and all fail with the same message.
#ifndef HVD_CTR_CORE_KEY_EXCHANGE_H_
#define HVD_CTR_CORE_KEY_EXCHANGE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tf_ops/core/options.h"
#include "tf_ops/core/rank_partition.h"
#include "tf_ops/core/status.h"
#include "tf_ops/core/types.h"

namespace hvd_ctr {

constexpr int64_t kKeyMessageMagic = 0x6876645f63747231;  // "hvd_ctr1"
constexpr int64_t kKeyHeaderWords = 8;
/// In place of the batch rows: the sender's data has ended. It goes on sending such messages until all ranks do.
constexpr int64_t kNoMoreBatches = -1;
constexpr int64_t kMaxErrorTextBytes = 4096;

/// What a rank tells its peers about its batch beside the keys.
struct BatchInfo {
  int64_t batch_rows = 0;   ///< B, or kNoMoreBatches
  double weight_sum = 0.0;  ///< Sum of sample weights (B when there are none).
  Status status;            ///< Not OK: the sender failed (reader error, ...); all ranks shall fail with this message.
  int32_t first_invalid_feature = -1;
  int64_t first_invalid_id = 0;
  std::vector<int64_t> invalid_counts;  ///< (T)
};

/// How often each key occurs in the sender's batch.
struct KeyCounts {
  Span<const int32_t> counts;   ///< (U) in the order of PartitionResult::grouped; may be empty where no table counts.
  Span<const uint8_t> counted;  ///< (T) 1: the counts of this table's keys are sent. Empty: no table's.
};

/// KeyCounts::counted of tables with these options: those with a min_count. Empty where there is none.
std::vector<uint8_t> CountedTables(const std::vector<TableOptions>& tables);

/// Builds the send buffer for all peers. words gets sum(splits) words; splits (W) words per peer. T is
/// info.invalid_counts.size(). Failures travel instead of keys: a status that is not OK, a partition or counts that do not fit W
/// and T (INTERNAL), or a message of 2^31 words or more (RESOURCE_EXHAUSTED). Error texts are cut to kMaxErrorTextBytes.
void PackKeys(const BatchInfo& info, const PartitionResult& partition, const KeyCounts& counts, int32_t world_size,
              std::vector<int64_t>* words, std::vector<int32_t>* splits);

/// One peer's message after UnpackKeys.
struct PeerMessage {
  BatchInfo info;
  int64_t key_offset = 0;  ///< First key in ReceivedKeys::ids.
  int64_t key_count = 0;
};

/// All ranks' requests to this rank: ids (R) and tables (R) in rank order, within a rank by table.
struct ReceivedKeys {
  std::vector<int64_t> ids;
  std::vector<int32_t> tables;
  std::vector<int32_t> counts;     ///< (R) occurrences, 1 for keys of tables that do not count. Empty: no table counts.
  std::vector<PeerMessage> peers;  ///< (W)
};

/// Parses words (sum of splits) from W peers; counted (T, or empty) as in KeyCounts. Checks magic, table count, every count and
/// size: DATA_LOSS naming the rank and field; *received is empty then. A peer that failed before it knew its tables may send T =
/// 0 beside its error.
Status UnpackKeys(Span<const int64_t> words, Span<const int32_t> splits, int32_t tables, Span<const uint8_t> counted,
                  ReceivedKeys* received);

/// The agreed verdict over all peers, the same on every rank: the lowest rank's failed status, prefixed by that rank; else, for a
/// table under InvalidIdPolicy::kError with invalid ids, OUT_OF_RANGE naming rank, feature, table, id, the allowed range and what
/// to set (feature and id are left out when the rank's first invalid id was in another table, one that skips them); else
/// INVALID_ARGUMENT for a weight sum that is not finite.
Status AgreedStatus(const ReceivedKeys& received, const MixCacheOptions& options);

/// Number of rows of `dim` floats with which an error is answered to a peer that asked for `expected` rows: positive and always
/// different from `expected`.
int64_t ErrorPayloadRows(const Status& status, int32_t dim, int64_t expected);
/// Fills rows (ErrorPayloadRows * dim floats): magic, status code, text bytes, text, then zeros, as bit patterns that must travel
/// unchanged. An OK status is encoded as INTERNAL: the receiver has to fail either way.
void EncodeErrorPayload(const Status& status, int32_t dim, int64_t payload_rows, float* rows);
/// rows received from one owner when the count was not the expected one -> its status, prefixed by nothing; DATA_LOSS if the rows
/// are no payload (a torn exchange), naming owner, expected and received.
Status DecodeErrorPayload(const float* rows, int64_t payload_rows, int32_t dim, int32_t owner, int64_t expected);

}  // namespace hvd_ctr

#endif  // HVD_CTR_CORE_KEY_EXCHANGE_H_
