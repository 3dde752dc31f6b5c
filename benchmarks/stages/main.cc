// hvd_ctr_stages: times the stages of the core, one thread, and prints one JSON object per result. benchmarks/stages.py builds
// and runs it and knows the targets.
//
//   hvd_ctr_stages REPEATS FOLDER GROUP...      groups: keys rows insert step disk
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "benchmarks/stages/stages.h"

int main(int argc, char** argv) {
  using namespace hvd_ctr::bench;
  const int repeats = argc > 3 ? std::atoi(argv[1]) : 0;
  if (repeats < 1) {
    std::fprintf(stderr, "usage: hvd_ctr_stages REPEATS FOLDER GROUP...  (groups: keys rows insert step disk)\n");
    return 2;
  }
  for (int i = 3; i < argc; ++i) {
    const std::string group = argv[i];
    if (group == "keys") {
      RunKeyStages(repeats);
    } else if (group == "rows") {
      RunRowStages(repeats);
    } else if (group == "insert") {
      RunInsertStages(repeats);
    } else if (group == "step") {
      RunStepStages(repeats);
    } else if (group == "disk") {
      RunDiskStages(repeats, argv[2]);
    } else {
      std::fprintf(stderr, "hvd_ctr_stages: there is no group '%s'\n", group.c_str());
      return 2;
    }
  }
  return 0;
}
