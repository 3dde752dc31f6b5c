// Names of the eviction policies, for names of tests.
#ifndef HVD_CTR_TESTS_CPP_POLICY_NAMES_H_
#define HVD_CTR_TESTS_CPP_POLICY_NAMES_H_

#include <string>

#include "tf_ops/core/options.h"

namespace hvd_ctr {

inline std::string PolicyName(EvictionPolicyKind kind) {
  const char* const names[] = {"Lru", "Lfu", "Clock", "Freq", "Lookahead"};
  return names[static_cast<int>(kind)];
}

}  // namespace hvd_ctr

#endif  // HVD_CTR_TESTS_CPP_POLICY_NAMES_H_
