#!/usr/bin/env bash
# Builds smddp for the python3 on PATH, and runs all tests and benchmarks that need a GPU. It needs no network, and less
# than nine minutes on 16 cores.
#
#   tools/gpu_check.sh                 build, test, measure; links the module that it built into smddp/
#   tools/gpu_check.sh pack <folder>   copies libfabric to a folder, for a machine that has no packages
#
# The most important steps come first. Each has its own time limit, and runs even if another one failed. The folder
# GPU_CHECK_OUT (default: gpu-check) gets two files: summary.txt with the result of each step, and logs.tar.gz with
# their output.
#
#   GPU_CHECK_PACK=<folder>    a folder that `pack` has filled; without libfabric, tests between nodes are left out
#   GPU_CHECK_ONLY=<pattern>   run only the steps whose names match, and `build`, which is quick if nothing changed
#   GPU_CHECK_SECONDS=<n>      time limit of all steps together (default: 520)
#   GPU_CHECK_CUDA=OFF         build without the CUDA part; the script also tries this if nvcc fails
#
# Needs: a torch with CUDA, cmake, ninja, g++ >= 12, pytest with pytest-timeout, psutil; nvcc for the CUDA part.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

pack() {
  local folder=$1 library
  mkdir -p "$folder/include" "$folder/lib"
  cp -r /usr/include/rdma "$folder/include/"
  library=$(ldconfig -p | awk '/libfabric.so.1 .*x86-64/ { print $NF; exit }')
  # Leave out the C library: the other machine must use its own.
  { echo "$library"; ldd "$library" | awk '$3 ~ /^\// { print $3 }' | grep -vE '/lib(c|m|dl|pthread|rt)\.so'; } |
    xargs -I{} cp -L {} "$folder/lib/"
  ln -sf libfabric.so.1 "$folder/lib/libfabric.so"
  du -sh "$folder"
}

case "${1:-} $#" in
  "pack 2") pack "$2"; exit ;;
  " 0") ;;
  *) sed -n '2,/^set / s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac

python=$(command -v python3) || { echo "no python3 on PATH"; exit 1; }
# Check this before anything is built, or linked into this folder.
if ! "$python" -c 'import sys, torch; sys.exit(torch.cuda.device_count() == 0)'; then
  echo "torch of $python sees no GPU here (torch.cuda.device_count() is 0): nothing to check"
  exit 1
fi
# cmake and ninja may be packages of that Python. CUDA's folder comes last, so it hides no other program.
PATH=$(dirname "$python"):$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
build=build/gpu
out=$(realpath -m "${GPU_CHECK_OUT:-gpu-check}")
limit=${GPU_CHECK_SECONDS:-520}
only=${GPU_CHECK_ONLY:-}
logs=$PWD/build/gpu-logs
rm -rf "$logs"
mkdir -p "$out" "$logs"
: >"$out/summary.txt"
failed=0
SECONDS=0

say() { echo "$*" | tee -a "$out/summary.txt"; }

# step <name> <seconds> <command...>: runs the command unless the time is up, with its output in its own file.
step() {
  local name=$1 most=$2 left=$((limit - SECONDS)) began=$SECONDS status=0
  shift 2
  [ -z "$only" ] || [[ $name =~ ^build|$only ]] || return 0
  if [ $left -lt 5 ]; then
    say "left out   $name: the time is up"
    failed=1
    return 1
  fi
  [ "$most" -le $left ] || most=$left
  timeout --kill-after=10 "$most" "$@" >"$logs/$name.log" 2>&1 || status=$?
  # The counts of pytest, because a step whose tests were all skipped has shown nothing.
  local counted
  counted=$(grep -oE '[0-9]+ (passed|failed|skipped|error)[^=]*' "$logs/$name.log" | tail -n 1)
  case $status in
    0) say "passed     $name ($((SECONDS - began)) s) $counted" ;;
    124 | 137) say "timed out  $name ($((SECONDS - began)) s) $counted" ;;
    *) say "failed $status   $name ($((SECONDS - began)) s) $counted" ;;
  esac
  tail -n 25 "$logs/$name.log"
  tar -C "$(dirname "$logs")" -czf "$out/logs.tar.gz" "$(basename "$logs")"
  [ $status -eq 0 ] || failed=1
  return $status
}

facts() {
  nvidia-smi
  nvcc --version | tail -2
  g++ --version | head -1
  cmake --version | head -1
  "$python" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda, "GPUs", torch.cuda.device_count(), torch.cuda.get_device_name(), "NCCL", torch.cuda.nccl.version())'
}

compile() {
  local options=(-DCMAKE_BUILD_TYPE=Release -DPYTHON_EXECUTABLE="$python" -DSMDDP_BUILD_TESTS=OFF
    -DSMDDP_WARNINGS_AS_ERRORS=OFF -DSMDDP_CUDA="${1:-ON}")
  # torch ships the headers of fmt.
  options+=(-DFMT_INCLUDE_DIR="$("$python" -c 'import os, torch; print(os.path.join(os.path.dirname(torch.__file__), "include"))')")
  [ -z "${GPU_CHECK_PACK:-}" ] || options+=(-DLIBFABRIC_HOME="$(realpath "$GPU_CHECK_PACK")")
  cmake -S . -B $build -G Ninja "${options[@]}" && cmake --build $build --target modules -j "$(nproc)" -- -k 0 || return
  ln -sfn "../$build/lib" smddp/lib
}

# The bandwidth of a copy within the GPU's memory: the limit for an all_reduce there, which reads and writes at least
# once per rank and byte.
copy_rate() {
  "$python" - <<'PYTHON'
import torch

for mib in (64, 256, 1024):
    one, two = (torch.empty(mib << 20, dtype=torch.uint8, device="cuda") for _ in range(2))
    for _ in range(3):
        two.copy_(one)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(20):
        two.copy_(one)
    end.record()
    torch.cuda.synchronize()
    print(f"copy of {mib} MiB: {2 * 20 * (mib << 20) / begin.elapsed_time(end) / 1e6:.0f} GB/s read and written")
PYTHON
}

# tests <name> <seconds> <argument of pytest...>
tests() {
  local parallel=()
  "$python" -c 'import xdist' 2>/dev/null && parallel=(-n "${WORKERS:-8}")
  # -v prints the result of each test when it ends, so a time limit loses no results.
  step "$1" "$2" "$python" -m pytest -v "${parallel[@]}" "${@:3}"
}

# measure <name> <path> <ranks> <seconds> [option...]
measure() {
  local name=bench-$1-$2-$3 path=$2 ranks=$3 seconds=$4
  shift 4
  step "$name" "$seconds" env SMDDP_GPU_PATH="$path" "$python" -m smddp.bench allreduce --memory gpu \
    --place in --ranks "$ranks" --json "$logs/$name.json" "$@"
}

# compute-sanitizer also checks the ranks, which are child processes. If it does not support the GPU, its log says so.
sanitize() {
  command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not on PATH"; return 1; }
  SMDDP_GPU_PATH=ipc timeout 100 compute-sanitizer --target-processes all --error-exitcode 9 \
    "$python" -m smddp.bench allreduce reduce_scatter all_gather_into_tensor all_to_all --memory gpu --backends smddp --ranks 2 \
    --counts 1,1001,100000 --iterations 2
}

export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
# torch.cuda.is_available() must not start CUDA in the process that the tests fork their ranks from.
export PYTORCH_NVML_BASED_CUDA_CHECK=1
# gloo and NCCL use the loopback interface, because the machine may have no network and its name may not resolve.
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-lo}
export -f facts compile copy_rate sanitize
export python build
if [ -n "${GPU_CHECK_PACK:-}" ]; then
  LD_LIBRARY_PATH=$(realpath "$GPU_CHECK_PACK")/lib:${LD_LIBRARY_PATH:-}
  export LD_LIBRARY_PATH
fi

short=(--min-bytes 1KiB --max-bytes 64MiB --factor 16 --seconds 0.3)
# A step of their own, because they take long.
long=(--min-bytes 256MiB --max-bytes 1GiB --factor 4 --iterations 5)

cuda=(-m gpu tests/python/test_cuda.py)

step facts 30 bash -c facts
if ! step build 240 bash -c "compile ${GPU_CHECK_CUDA:-ON}"; then
  # The paths through the host and through NCCL need no nvcc.
  step build-without-nvcc 120 bash -c "compile OFF" || exit 1
fi
tests test-memory-first 60 "${cuda[@]}" -k "in_memory and reduces and 2"
tests test-memory 120 "${cuda[@]}" -k "(in_memory or in_pieces) and not buckets"
tests test-new 60 "${cuda[@]}" -k "bound or nobody_has_chosen or buckets"
tests test-smp-fits 150 tests/python/smp/test_{sharding,activations,activation_memory,optimizer_shards,delayed}.py \
  -k "learn_the_same or bits_of_whole or any_degree or pinned or undivided_state or training_is"
tests test-smp 100 tests/python/smp/test_{transparency,half}.py
tests test-rails 90 "${cuda[@]}" -k "rails"
tests test-host-and-nccl 120 "${cuda[@]}" -k "not in_memory and not in_pieces and not buckets and not rails and not bound and not captured"
step copy-rate 30 bash -c copy_rate
for ranks in 2 4; do
  measure short ipc $ranks 45 "${short[@]}" --backends smddp,gloo
done
measure short host 2 30 "${short[@]}" --backends smddp
tests test-captured 90 "${cuda[@]}" -k "captured"
# The processes take turns on the GPU, so a step of many small kernels gets slower with each of them.
WORKERS=1 tests test-examples 150 tests/python/smp/test_examples.py
step sanitize 110 bash -c sanitize
step bench-others 60 env SMDDP_GPU_PATH=ipc "$python" -m smddp.bench \
  allreduce reduce_scatter all_gather_into_tensor broadcast --memory gpu --place out --ranks 4 --min-bytes 64MiB --max-bytes 64MiB --backends smddp,gloo
for ranks in 2 4; do
  measure long ipc $ranks 60 "${long[@]}" --backends smddp
done
measure long host 4 60 "${long[@]}" --backends smddp,gloo
say "ended after $SECONDS s"
exit $failed
