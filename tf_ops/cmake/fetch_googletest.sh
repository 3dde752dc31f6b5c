#!/usr/bin/env bash
# fetch_googletest.sh FOLDER: downloads Debian's (or Ubuntu's) `googletest` package into FOLDER and unpacks it there,
# without root, and prints the folder of its CMakeLists.txt. A failure is one line on stderr; then nothing is printed.
set -euo pipefail

folder=$1
sources=$folder/root/usr/src/googletest
if [[ -f $sources/CMakeLists.txt ]]; then
  echo "$sources"
  exit 0
fi
for tool in apt-get dpkg; do
  command -v "$tool" >/dev/null || { echo "there is no $tool to fetch Debian's googletest package with" >&2; exit 1; }
done
mkdir -p "$folder"
cd "$folder"

# The package lists of the system may be missing or old, and only root may renew them: then keep a private copy of them here.
private_lists=(-o "Dir::State::Lists=$folder/lists" -o "Dir::Cache=$folder/cache" -o "Debug::NoLocking=1")
if ! apt-get download googletest >apt.log 2>&1; then
  mkdir -p lists/partial cache/archives/partial
  if ! { apt-get "${private_lists[@]}" update && apt-get "${private_lists[@]}" download googletest; } >>apt.log 2>&1; then
    echo "'apt-get download googletest' failed: $(grep -m1 '^E:' apt.log || tail -n1 apt.log)" >&2
    exit 1
  fi
fi
dpkg -x googletest_*.deb root
[[ -f $sources/CMakeLists.txt ]] || { echo "Debian's googletest package has no usr/src/googletest/CMakeLists.txt" >&2; exit 1; }
echo "$sources"
