#!/usr/bin/env bash
# Runs every fuzzer of a build for some seconds, as many at a time as there are cores:
#
#   tests/fuzz/run.sh <build folder> <seconds>
#
# Each goes on from what it has learnt in earlier runs with this folder. An input that breaks something is
# left in <build folder>/found; put it into tests/fuzz/found/<fuzzer>/, where it is tried first from then on.
set -euo pipefail
cd "$(dirname "$0")"
build=$(cd ../.. && cd "$1" && pwd)
export build seconds=$2

"$build/tests/fuzz/fuzz_seeds" "$build/seeds"
mkdir -p "$build/found"

run() {
  local name=$1 log=$build/found/$1.log status=0
  mkdir -p "$build/corpus/$name" "found/$name"
  "$build/tests/fuzz/$name" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -max_len=4096 \
    -print_final_stats=1 -artifact_prefix="$build/found/$name-" \
    "$build/corpus/$name" "$build/seeds/$name" "found/$name" >"$log" 2>&1 || status=$?
  printf '%-16s %12s inputs in %s s: %s\n' "$name" \
    "$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")" "$seconds" \
    "$([ $status = 0 ] && echo nothing found || echo "FAILED, see $log")"
  [ $status = 0 ] || tail -n 60 "$log"
  return $status
}
export -f run

# Their own complaints about hostile bytes would bury what they find.
export SMDDP_LOG=error UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
find "$build/tests/fuzz" -maxdepth 1 -name '*_fuzz' -printf '%f\n' | sort |
  xargs -P "$(nproc)" -I{} bash -c 'run {}'
