#!/usr/bin/env bash
# quickstart.sh: from a fresh clone to a trained model. Sets up what is missing, makes Criteo-shaped data in data/quickstart, trains
# DeepFM on 2 ranks and evaluates it.
#
#   ./launch/quickstart.sh
#   ./launch/quickstart.sh --set train.epochs=2          --set goes to all three commands
#
#   HVD_CTR_RANKS=4      the number of ranks (default: 2)
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
cd "$root"

config=configs/quickstart.yaml
ranks=${HVD_CTR_RANKS:-2}
started=$(date +%s%N)

"$root/launch/setup.sh"
. "$root/launch/env.sh"

# announce TITLE COMMAND...: shows the command, so that a user can run the same alone, and runs it.
announce() {
  echo
  echo "=== $1"
  shift
  echo "\$ $*"
  local step_started
  step_started=$(date +%s%N)
  "$@"
  echo "($(seconds_since "$step_started") s)"
}

announce "data with a hidden teacher, whose own AUC is the best reachable" hvd-ctr synth "$config" "$@"
announce "training on $ranks ranks" ./launch/mpirun.sh -np "$ranks" hvd-ctr train "$config" --overwrite "$@"
announce "evaluation" ./launch/mpirun.sh -np "$ranks" hvd-ctr evaluate "$config" "$@"

echo
echo "quickstart: done in $(seconds_since "$started") s"
