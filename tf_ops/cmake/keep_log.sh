#!/usr/bin/env bash
# keep_log.sh OBJECT COMMAND...: runs a compiler and keeps what it says in OBJECT.log; shows it only where the compiler fails.
log=$1.log
shift
mkdir -p "$(dirname "$log")"
"$@" >"$log" 2>&1 || {
  status=$?
  cat "$log"
  exit "$status"
}
