#!/usr/bin/env bash
# keep_log.sh OBJECT COMMAND...: runs a compiler and keeps what it says in OBJECT.log. Where it fails, all that is no statistics is
# shown.
log=$1.log
shift
mkdir -p "$(dirname "$log")"
"$@" >"$log" 2>&1 || {
  status=$?
  grep -vE '^ptxas info|^ +[0-9]+ bytes stack frame' "$log"
  exit "$status"
}
