// The groups of stages; each prints its results (harness.h). repeats: sweeps that count.
#ifndef HVD_CTR_BENCHMARKS_STAGES_STAGES_H_
#define HVD_CTR_BENCHMARKS_STAGES_STAGES_H_

#include <string>

namespace hvd_ctr::bench {

void RunKeyStages(int repeats);     ///< Dedupe and partition, owner union, directory: stages_keys.cc.
void RunRowStages(int repeats);     ///< Gather, expand, pool, segment sum, optimizers: stages_rows.cc.
void RunInsertStages(int repeats);  ///< Creation of rows by Prefetch: stages_step.cc.
void RunStepStages(int repeats);    ///< The whole work of one rank, and 1,000 tables beside 26: stages_step.cc.
/// Reads and writes of the disk tier, on a file in `folder`: stages_disk.cc.
void RunDiskStages(int repeats, const std::string& folder);

}  // namespace hvd_ctr::bench

#endif  // HVD_CTR_BENCHMARKS_STAGES_STAGES_H_
