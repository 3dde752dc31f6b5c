#include "tf_ops/cpu/scatter_add.h"

#include <algorithm>
#include <cstring>

#include "tf_ops/core/simd_level.h"
#include "tf_ops/cpu/row_loops.h"

namespace hvd_ctr {
namespace {

/// Floats of work below which a second thread costs more than it saves.
constexpr int64_t kMinFloatsPerPart = 1 << 15;
constexpr int64_t kBlock = 256;

/// The part that owns a target row. Rows of one cache line go together.
struct PartOf {
  uint32_t parts;
  uint32_t shift;
  uint32_t operator()(uint32_t target) const {
    const uint32_t mixed = (target >> shift) * 0x9e3779b1u;
    return static_cast<uint32_t>((static_cast<uint64_t>(mixed) * parts) >> 32);
  }
};

/// to += from (times coefficient), kColumns columns.
template <int32_t kColumns, bool kScaled>
HVD_CTR_SIMD_BODY void AddColumns(const float* from, float coefficient, float* to) {
  typename FloatVector<kColumns>::Type terms, sums;
  std::memcpy(&terms, from, sizeof(terms));
  std::memcpy(&sums, to, sizeof(sums));
  if (kScaled) terms = coefficient * terms;
  sums += terms;
  std::memcpy(to, &sums, sizeof(sums));
}

/// The arguments with the pointers in locals, specialised on width (0: run-time dim), bag map and coefficients.
template <SimdLevel kLevel, int32_t kDim, bool kMapped, bool kScaled>
struct Adder {
  static constexpr bool kHasMap = kMapped;

  explicit Adder(const ScatterArgs& args)
      : source(args.source),
        places(args.places),
        dim(kDim > 0 ? kDim : args.dim),
        targets(args.targets.data()),
        source_rows(args.source_rows),
        coefficients(args.coefficients),
        sums(args.sums) {}

  /// Adds position p, whose source row begins at float `offset`.
  HVD_CTR_SIMD_BODY void Add(int64_t p, int64_t offset) const {
    const float* from = source + offset;
    float* to = sums + int64_t{targets[p]} * dim;
    const float coefficient = kScaled ? coefficients[p] : 1.0f;
    const int64_t width = kDim > 0 ? kDim : dim;
    constexpr int32_t kLanes = SimdFloats(kLevel);
    int64_t j = 0;
    for (; j + kLanes <= width; j += kLanes) AddColumns<kLanes, kScaled>(from + j, coefficient, to + j);
    for (; kLanes > 4 && j + 4 <= width; j += 4) AddColumns<4, kScaled>(from + j, coefficient, to + j);
    for (; j < width; ++j) AddColumns<1, kScaled>(from + j, coefficient, to + j);
  }

  HVD_CTR_SIMD_BODY void operator()(int64_t p) const { Add(p, places.at(kMapped ? source_rows[p] : p)); }

  const float* source;
  BagPlaces places;
  int64_t dim;
  const int32_t* targets;
  const int32_t* source_rows;
  const float* coefficients;
  float* sums;
};

/// All positions on this thread.
template <typename AdderType>
HVD_CTR_SIMD_BODY void AddAll(const ScatterArgs& args) {
  const AdderType add(args);
  const int64_t n = args.targets.size();
  if (AdderType::kHasMap) {
    for (int64_t p = 0; p < n; ++p) {
      if (add.targets[p] >= 0) add(p);
    }
    return;
  }
  BagWalk walk(args.places, 0);
  for (int64_t p = 0; p < n; ++p, walk.Next()) {
    if (add.targets[p] >= 0) add.Add(p, walk.offset());
  }
}

/// The positions whose target belongs to `part`: first listed without branches, block by block, then added.
template <typename AdderType>
HVD_CTR_SIMD_BODY void AddPart(const ScatterArgs& args, const PartOf& part_of, uint32_t part) {
  const AdderType add(args);
  const int64_t n = args.targets.size();
  int32_t mine[kBlock];
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    int64_t count = 0;
    for (int64_t p = begin; p < end; ++p) {
      const int32_t target = add.targets[p];
      mine[count] = static_cast<int32_t>(p - begin);
      count += (target >= 0) & (part_of(static_cast<uint32_t>(target)) == part);
    }
    for (int64_t i = 0; i < count; ++i) add(begin + mine[i]);
  }
}

/// parts == 1 runs all positions.
template <SimdLevel kLevel, int32_t kDim>
HVD_CTR_SIMD_BODY void AddWidth(const ScatterArgs& args, const PartOf& part_of, uint32_t part) {
  const bool all = part_of.parts == 1;
  if (args.source_rows == nullptr) {
    return all ? AddAll<Adder<kLevel, kDim, false, false>>(args)
               : AddPart<Adder<kLevel, kDim, false, false>>(args, part_of, part);
  }
  if (args.coefficients == nullptr) {
    return all ? AddAll<Adder<kLevel, kDim, true, false>>(args) : AddPart<Adder<kLevel, kDim, true, false>>(args, part_of, part);
  }
  return all ? AddAll<Adder<kLevel, kDim, true, true>>(args) : AddPart<Adder<kLevel, kDim, true, true>>(args, part_of, part);
}

template <SimdLevel kLevel>
HVD_CTR_SIMD_BODY void AddPositionsBody(const ScatterArgs& args, const PartOf& part_of, uint32_t part) {
  if (args.dim == 16) return AddWidth<kLevel, 16>(args, part_of, part);
  AddWidth<kLevel, 0>(args, part_of, part);
}

HVD_CTR_SIMD_KERNEL(void, AddPositions, (const ScatterArgs& args, const PartOf& part_of, uint32_t part), (args, part_of, part))

}  // namespace

void ScatterAdd(const ScatterArgs& args, TaskRunner* runner) {
  ForRows(runner, args.unique, args.dim,
          [&args](int64_t begin, int64_t end) { ZeroRow((end - begin) * args.dim, args.sums + begin * args.dim); });
  const int64_t floats = args.targets.size() * args.dim;
  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(runner->threads(), floats / kMinFloatsPerPart));
  uint32_t shift = 0;
  while ((int64_t{args.dim} << shift) < kLineFloats) ++shift;
  const PartOf part_of{static_cast<uint32_t>(parts), shift};
  runner->Run(parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) AddPositions(args, part_of, static_cast<uint32_t>(part));
  });
}

}  // namespace hvd_ctr
