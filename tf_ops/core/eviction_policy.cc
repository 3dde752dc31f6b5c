#include "tf_ops/core/eviction_policy.h"

namespace hvd_ctr {

std::unique_ptr<EvictionPolicy> MakeEvictionPolicy(EvictionPolicyKind kind, int64_t slots, int32_t window) {
  switch (kind) {
    case EvictionPolicyKind::kLfu:
      return MakeLfuPolicy(slots);
    case EvictionPolicyKind::kClock:
      return MakeClockPolicy(slots);
    case EvictionPolicyKind::kFreq:
      return MakeFreqPolicy(slots);
    case EvictionPolicyKind::kLookahead:
      return MakeLookaheadPolicy(slots, window);
    case EvictionPolicyKind::kLru:
      break;
  }
  return MakeLruPolicy(slots);
}

int64_t PlanPolicyBytes(EvictionPolicyKind kind, int64_t slots, const PolicyDemand& demand) {
  switch (kind) {
    case EvictionPolicyKind::kLfu:
    case EvictionPolicyKind::kFreq:
      return PlanFrequencyBytes(kind, slots, demand);
    case EvictionPolicyKind::kClock:
      return PlanClockBytes(slots);
    case EvictionPolicyKind::kLookahead:
    case EvictionPolicyKind::kLru:
      break;
  }
  return PlanRecencyBytes(kind, slots, demand);
}

}  // namespace hvd_ctr
