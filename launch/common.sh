# Sourced by the scripts of this folder: where things are, how a step is announced, timed and logged.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
log_folder=$root/build/logs
script_name=$(basename "$0" .sh)

# fail WHAT REMEDY: one line that says what is wrong and what to do about it.
fail() {
  echo "$script_name: error: $1; $2" >&2
  exit 1
}

# seconds_since TIME: TIME as `date +%s%N` gave it; seconds with one decimal.
seconds_since() {
  local tenths=$((($(date +%s%N) - $1) / 100000000))
  echo "$((tenths / 10)).$((tenths % 10))"
}

# run_step NAME "what is done" COMMAND...: says what is done and how long it took. The output goes to build/logs/NAME.log; a
# failure shows its last lines and ends the script.
run_step() {
  local name=$1 title=$2 status started log=$log_folder/$1.log
  shift 2
  mkdir -p "$log_folder"
  printf '%s: %s ... ' "$script_name" "$title"
  started=$(date +%s%N)
  # Not `if ! ( ... )`: bash ignores -e inside a condition.
  set +e
  (
    set -e
    "$@"
  ) >"$log" 2>&1
  status=$?
  set -e
  if ((status != 0)); then
    echo "FAILED after $(seconds_since "$started") s"
    tail -n 20 "$log" | sed 's/^/  | /' >&2
    echo "$script_name: error: '$name' failed with exit status $status; the last lines are above, all of them in $log" >&2
    exit 1
  fi
  echo "$(seconds_since "$started") s"
}

# hash_of FILE_OR_FOLDER...: one hash over the names and contents of the files.
hash_of() {
  (cd "$root" && find "$@" -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -c1-32)
}

# A stamp in the virtual environment remembers the inputs of a step that succeeded. stamp_is NAME VALUE; write_stamp NAME VALUE
stamp_is() { [[ -f $venv/.hvd_ctr/$1 && $(<"$venv/.hvd_ctr/$1") == "$2" ]]; }
write_stamp() {
  mkdir -p "$venv/.hvd_ctr"
  echo "$2" >"$venv/.hvd_ctr/$1"
}

# pin NAME: the version that launch/constraints.txt asks for.
pin() { sed -n "s/^$1==\([^ ;]*\).*/\1/p" "$root/launch/constraints.txt" | head -n1; }
