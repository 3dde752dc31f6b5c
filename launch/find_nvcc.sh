#!/usr/bin/env bash
# find_nvcc.sh: prints the nvcc to use: $CUDACXX, or that of $HOROVOD_CUDA_HOME, or the one on PATH, or that of /usr/local/cuda.
# Where there is none it says on stderr where it looked, and fails.
set -euo pipefail

candidates=(nvcc /usr/local/cuda/bin/nvcc)
missing="there is no nvcc on PATH and none in /usr/local/cuda"
if [[ -n ${CUDACXX:-} ]]; then
  candidates=("$CUDACXX")
  missing="CUDACXX=$CUDACXX is no program"
elif [[ -n ${HOROVOD_CUDA_HOME:-} ]]; then
  candidates=("$HOROVOD_CUDA_HOME/bin/nvcc")
  missing="HOROVOD_CUDA_HOME=$HOROVOD_CUDA_HOME has no bin/nvcc"
fi
for candidate in "${candidates[@]}"; do
  if command -v "$candidate"; then exit 0; fi
done
echo "$missing" >&2
exit 1
