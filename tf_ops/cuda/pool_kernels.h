// Kernels of expand and pool, and of its gradients. The arithmetic and its order are those of cpu/pool_rows.cc: each output
// element is summed by one thread, ids in ascending order, from zero, so both give the same bits. Launched by device_pool_impl.h.
#ifndef HVD_CTR_CUDA_POOL_KERNELS_H_
#define HVD_CTR_CUDA_POOL_KERNELS_H_

#include <cstdint>

#include "tf_ops/core/bags.h"
#include "tf_ops/core/hash.h"
#include "tf_ops/cuda/kernel_geometry.h"

namespace hvd_ctr {

/// Bags whose arrays are all in device memory.
struct DeviceBags {
  const int32_t* virtual_ids = nullptr;  ///< (N)
  const int64_t* splits = nullptr;       ///< (bags + 1), or null: one id per bag.
  const float* weights = nullptr;        ///< (N), or null: all 1.
  Combiner combiner = Combiner::kSum;

  HVD_CTR_HD int64_t begin(int64_t bag) const { return splits == nullptr ? bag : splits[bag]; }
  HVD_CTR_HD int64_t end(int64_t bag) const { return splits == nullptr ? bag + 1 : splits[bag + 1]; }
  HVD_CTR_HD float weight(int64_t p) const { return weights == nullptr ? 1.0f : weights[p]; }
};

/// sum += coefficient * term; kScaled: the coefficient is not 1.
template <bool kScaled, int32_t kFloats>
HVD_CTR_HD inline void AddPiece(float coefficient, const Piece<kFloats>& term, Piece<kFloats>* sum) {
  for (int32_t i = 0; i < kFloats; ++i) sum->v[i] += kScaled ? coefficient * term.v[i] : term.v[i];
}

/// Bags that a thread of CopyBagsKernel loads together.
constexpr int32_t kCopyBags = 4;

/// One unweighted id per bag: out = row, or zeros for a dropped id. Layout: bags, kCopyBags repeats.
template <int32_t kFloats>
struct CopyBagsKernel {
  RowLayout layout;
  const int32_t* virtual_ids;
  const float* rows;
  int64_t dim;
  float* out;
  BagPlaces places;

  HVD_CTR_HD void operator()(int64_t block, int32_t thread) const {
    int32_t ids[kCopyBags];
    int64_t offsets[kCopyBags];
    for (int32_t k = 0; k < kCopyBags; ++k) {
      const int64_t bag = layout.row(block, thread, k);
      ids[k] = bag < layout.rows ? virtual_ids[bag] : kNoVirtualId;
      offsets[k] = bag < layout.rows ? places.at(bag) : -1;
    }
    for (int32_t piece = layout.lane(thread); piece < layout.pieces; piece += layout.lanes()) {
      const int64_t column = int64_t{piece} * kFloats;
      Piece<kFloats> pieces[kCopyBags];
      for (int32_t k = 0; k < kCopyBags; ++k) {
        pieces[k] = ids[k] < 0 ? ZeroPiece<kFloats>() : LoadPiece<kFloats>(rows + ids[k] * dim + column);
      }
      for (int32_t k = 0; k < kCopyBags; ++k) {
        if (offsets[k] >= 0) StorePiece(pieces[k], out + offsets[k] + column);
      }
    }
  }
};

/// out = combined rows of each bag. Layout: bags.
template <int32_t kFloats, bool kWeighted>
struct SumBagsKernel {
  RowLayout layout;
  DeviceBags bags;
  const float* rows;
  int64_t dim;
  float* out;
  BagPlaces places;

  HVD_CTR_HD void operator()(int64_t block, int32_t thread) const {
    const int64_t bag = layout.row(block, thread);
    if (bag >= layout.rows) return;
    const int64_t begin = bags.begin(bag), end = bags.end(bag);
    float* const to = out + places.at(bag);
    for (int32_t piece = layout.lane(thread); piece < layout.pieces; piece += layout.lanes()) {
      const int64_t column = int64_t{piece} * kFloats;
      StorePiece(Combined(begin, end, rows + column), to + column);
    }
  }

  /// The divisor's total is summed beside the row: the ids are read anyway.
  HVD_CTR_HD Piece<kFloats> Combined(int64_t begin, int64_t end, const float* columns) const {
    Piece<kFloats> sum = ZeroPiece<kFloats>();
    float total = 0.0f;
    for (int64_t p = begin; p < end; ++p) {
      const int32_t id = bags.virtual_ids[p];
      if (id < 0) continue;
      const float weight = kWeighted ? bags.weights[p] : 1.0f;
      AddPiece<kWeighted>(weight, LoadPiece<kFloats>(columns + id * dim), &sum);
      total += DivisorTerm(bags.combiner, weight);
    }
    if (bags.combiner == Combiner::kSum) return sum;
    const float divisor = DivisorOf(bags.combiner, total);
    if (divisor == 0.0f) return ZeroPiece<kFloats>();
    if (divisor != 1.0f) {
      for (int32_t i = 0; i < kFloats; ++i) sum.v[i] = sum.v[i] / divisor;
    }
    return sum;
  }
};

/// divisors (bags); a thread per bag. Not for sum, whose divisor is 1.
struct DivisorsKernel {
  int64_t count;
  DeviceBags bags;
  float* divisors;

  HVD_CTR_HD void operator()(int64_t block, int32_t thread) const {
    const int64_t bag = ThreadIndex(block, thread);
    if (bag >= count) return;
    float total = 0.0f;
    for (int64_t p = bags.begin(bag); p < bags.end(bag); ++p) {
      if (bags.virtual_ids[p] >= 0) total += DivisorTerm(bags.combiner, bags.weight(p));
    }
    divisors[bag] = DivisorOf(bags.combiner, total);
  }
};

/// Positions of the batch by virtual id, ascending within each: entries starts[v] .. starts[v + 1] - 1 belong to id v.
struct DeviceSegments {
  const int32_t* starts = nullptr;     ///< (U + 1)
  const int32_t* bags = nullptr;       ///< Bag of each entry.
  const int32_t* positions = nullptr;  ///< Position of each entry; null: as its bag.
};

/// Terms that a thread of RowGradKernel loads together: long segments of hot ids wait for memory once per so many.
constexpr int32_t kGradTerms = 4;

/// d_rows (U, D) = sum over the entries of each id of weight / divisor * gradient of the bag. Layout: ids. kScaled: there are
/// weights or divisors.
template <int32_t kFloats, bool kScaled>
struct RowGradKernel {
  RowLayout layout;
  DeviceSegments segments;
  const float* weights;   ///< (N), or null: all 1.
  const float* divisors;  ///< (bags), or null: all 1.
  const float* d_out;
  BagPlaces places;
  int64_t dim;
  float* d_rows;

  HVD_CTR_HD void operator()(int64_t block, int32_t thread) const {
    const int64_t id = layout.row(block, thread);
    if (id >= layout.rows) return;
    const int64_t begin = segments.starts[id], end = segments.starts[id + 1];
    for (int32_t piece = layout.lane(thread); piece < layout.pieces; piece += layout.lanes()) {
      const int64_t column = int64_t{piece} * kFloats;
      Piece<kFloats> sum = ZeroPiece<kFloats>();
      int64_t e = begin;
      for (; e + kGradTerms <= end; e += kGradTerms) AddTerms<kGradTerms>(e, column, &sum);
      for (; e < end; ++e) AddTerms<1>(e, column, &sum);
      StorePiece(sum, d_rows + id * dim + column);
    }
  }

  /// Entries first .. first + kTerms - 1. A bag that pools to zeros adds nothing, whatever its gradient is.
  template <int32_t kTerms>
  HVD_CTR_HD void AddTerms(int64_t first, int64_t column, Piece<kFloats>* sum) const {
    Piece<kFloats> terms[kTerms];
    float coefficients[kTerms];
    bool counts[kTerms];
    for (int32_t k = 0; k < kTerms; ++k) {
      const int32_t bag = segments.bags[first + k];
      counts[k] = true;
      if (kScaled) {
        const int32_t position = segments.positions == nullptr ? bag : segments.positions[first + k];
        const float divisor = divisors == nullptr ? 1.0f : divisors[bag];
        counts[k] = divisor != 0.0f;
        coefficients[k] = (weights == nullptr ? 1.0f : weights[position]) / divisor;
      }
      terms[k] = LoadPiece<kFloats>(d_out + places.at(bag) + column);
    }
    for (int32_t k = 0; k < kTerms; ++k) {
      if (counts[k]) AddPiece<kScaled>(kScaled ? coefficients[k] : 1.0f, terms[k], sum);
    }
  }
};

/// lanes (N, 16) of the scalar product of each position's row with its bag's gradient; 0 where the id was dropped. Layout:
/// positions, kPoolDotLanes pieces.
struct DotLanesKernel {
  RowLayout layout;
  const int32_t* virtual_ids;
  const int32_t* bags;  ///< Bag of each position, or null: its own.
  const float* rows;
  const float* d_out;
  BagPlaces places;
  int64_t dim;
  float* lanes;

  HVD_CTR_HD void operator()(int64_t block, int32_t thread) const {
    const int64_t p = layout.row(block, thread);
    if (p >= layout.rows) return;
    const int32_t lane = layout.lane(thread);
    const int32_t id = virtual_ids[p];
    float sum = 0.0f;
    if (id >= 0) {
      const float* const row = rows + id * dim;
      const float* const d_bag = d_out + places.at(bags == nullptr ? p : bags[p]);
      for (int64_t j = lane; j < dim; j += kPoolDotLanes) sum += row[j] * d_bag[j];
    }
    lanes[p * kPoolDotLanes + lane] = sum;
  }
};

/// dots (N): the lanes in order; a thread per position.
struct SumLanesKernel {
  int64_t count;
  const float* lanes;
  float* dots;

  HVD_CTR_HD void operator()(int64_t block, int32_t thread) const {
    const int64_t p = ThreadIndex(block, thread);
    if (p >= count) return;
    float sum = 0.0f;
    for (int32_t i = 0; i < kPoolDotLanes; i += kPieceFloats) {
      const Piece<kPieceFloats> piece = LoadPiece<kPieceFloats>(lanes + p * kPoolDotLanes + i);
      for (int32_t k = 0; k < kPieceFloats; ++k) sum += piece.v[k];
    }
    dots[p] = sum;
  }
};

/// Turns the dots in d_weights (N) into derivatives by the weights (WeightGradOf); a thread per bag. Not for sum.
struct WeightGradKernel {
  int64_t count;
  DeviceBags bags;
  float* d_weights;

  HVD_CTR_HD void operator()(int64_t block, int32_t thread) const {
    const int64_t bag = ThreadIndex(block, thread);
    if (bag >= count) return;
    const int64_t begin = bags.begin(bag), end = bags.end(bag);
    float total = 0.0f, weighted = 0.0f;
    for (int64_t p = begin; p < end; ++p) {
      if (bags.virtual_ids[p] < 0) continue;
      const float weight = bags.weight(p);
      total += DivisorTerm(bags.combiner, weight);
      weighted += weight * d_weights[p];
    }
    const float divisor = DivisorOf(bags.combiner, total);
    for (int64_t p = begin; p < end; ++p) {
      d_weights[p] =
          bags.virtual_ids[p] < 0 ? 0.0f : WeightGradOf(bags.combiner, d_weights[p], bags.weight(p), weighted, divisor);
    }
  }
};

/// The columns beside the pooled vectors: row i of from (rows, columns) to `to` + i * stride. Layout: rows, `columns` pieces.
struct CopyColumnsKernel {
  RowLayout layout;
  const float* from;
  float* to;
  int64_t stride;

  HVD_CTR_HD void operator()(int64_t block, int32_t thread) const {
    const int64_t row = layout.row(block, thread);
    if (row >= layout.rows) return;
    for (int32_t j = layout.lane(thread); j < layout.pieces; j += layout.lanes()) {
      to[row * stride + j] = from[row * layout.pieces + j];
    }
  }
};

}  // namespace hvd_ctr

#endif  // HVD_CTR_CUDA_POOL_KERNELS_H_
