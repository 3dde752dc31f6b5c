#!/usr/bin/env bash
# find_nvcc.sh: prints the path of the nvcc to use: $CUDACXX, that of $HOROVOD_CUDA_HOME, the one on PATH, that of /usr/local/cuda.
set -euo pipefail

if [[ -n ${CUDACXX:-} ]]; then
  candidates=("$CUDACXX")
  where="CUDACXX=$CUDACXX is no program"
elif [[ -n ${HOROVOD_CUDA_HOME:-} ]]; then
  candidates=("$HOROVOD_CUDA_HOME/bin/nvcc")
  where="HOROVOD_CUDA_HOME=$HOROVOD_CUDA_HOME holds no bin/nvcc"
else
  candidates=(nvcc /usr/local/cuda/bin/nvcc)
  where="no nvcc on PATH and none in /usr/local/cuda"
fi
for candidate in "${candidates[@]}"; do
  if command -v "$candidate"; then exit 0; fi
done
echo "$where; install the CUDA toolkit (for TensorFlow 2.18: 12.x) or set CUDACXX to its nvcc" >&2
exit 1
