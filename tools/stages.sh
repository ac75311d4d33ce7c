#!/usr/bin/env bash
# Runs targets of the Makefile one after the other, stops at the first that fails, and prints at the end
# how many seconds each has taken, and how much processor time (docs/testing.md):
#
#   tools/stages.sh <target>...
#
# a+b runs two targets at the same time, for those that do not use all cores. What a says comes when both have ended.
set -uo pipefail
cd "$(dirname "$0")/.."

said=$(mktemp) beside=
trap 'rm -f "$said"; [ -z "$beside" ] || kill "$beside"' EXIT

# Sets `used` to the processor seconds of all children so far. Not in a subshell, which has none of them.
# `times` prints them in its second line: 0m1.234s 0m0.567s.
processor() {
  times >"$said"
  used=$(sed -n 2p "$said" | tr 'ms' '  ' | awk '{ printf "%d", $1 * 60 + $2 + $3 * 60 + $4 }')
}

rows=() status=0
for target in "$@"; do
  processor
  start=$SECONDS before=$used
  if [[ $target = *+* ]]; then
    "${MAKE:-make}" --no-print-directory "${target%+*}" >"$said" 2>&1 &
    beside=$!
  fi
  "${MAKE:-make}" --no-print-directory "${target#*+}" || status=$?
  if [ -n "$beside" ]; then
    wait "$beside" || status=$?
    beside=
    cat "$said"
  fi
  processor
  rows+=("$(printf '%-34s %8d %12d' "$target" $((SECONDS - start)) $((used - before)))")
  [ $status = 0 ] || break
done
printf '%-34s %8s %12s\n' stage seconds processor
printf '%s\n' "${rows[@]}"
exit $status
