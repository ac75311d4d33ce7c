#!/usr/bin/env bash
# Builds smddp for the python3 on PATH and runs everything that needs a GPU; no network, under nine minutes on 16 cores.
#
#   tools/gpu_check.sh                 build, test, measure
#   tools/gpu_check.sh pack <folder>   on another machine, before: what one without packages lacks (libfabric)
#
# A folder `pack` has filled is found as GPU_CHECK_PACK. Without libfabric the tests between nodes are left out.
# Needs: a torch with CUDA, cmake, ninja, g++ >= 12, pytest with pytest-timeout, psutil.
set -euo pipefail
cd "$(dirname "$0")/.."

pack() {
  local folder=$1 library
  mkdir -p "$folder/include" "$folder/lib"
  cp -r /usr/include/rdma "$folder/include/"
  library=$(ldconfig -p | awk '/libfabric.so.1 .*x86-64/ { print $NF; exit }')
  # The C library is the other machine's own.
  { echo "$library"; ldd "$library" | awk '$3 ~ /^\// { print $3 }' | grep -vE '/lib(c|m|dl|pthread|rt)\.so'; } |
    xargs -I{} cp -L {} "$folder/lib/"
  ln -sf libfabric.so.1 "$folder/lib/libfabric.so"
  du -sh "$folder"
}

if [ "${1:-}" = pack ]; then
  pack "$2"
  exit
fi

python=$(command -v python3)
build=build/gpu
jobs=$(nproc)
"$python" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda, "GPUs", torch.cuda.device_count(), torch.cuda.get_device_name(), "NCCL", torch.cuda.nccl.version())'

options=(-DCMAKE_BUILD_TYPE=Release -DPYTHON_EXECUTABLE="$python" -DSMDDP_BUILD_TESTS=OFF -DSMDDP_WARNINGS_AS_ERRORS=OFF)
# torch brings the headers of fmt along.
options+=(-DFMT_INCLUDE_DIR="$("$python" -c 'import os, torch; print(os.path.join(os.path.dirname(torch.__file__), "include"))')")
if [ -n "${GPU_CHECK_PACK:-}" ]; then
  options+=(-DLIBFABRIC_HOME="$(realpath "$GPU_CHECK_PACK")")
  LD_LIBRARY_PATH=$(realpath "$GPU_CHECK_PACK")/lib:${LD_LIBRARY_PATH:-}
  export LD_LIBRARY_PATH
fi
SECONDS=0
cmake -S . -B $build -G Ninja "${options[@]}"
cmake --build $build --target _C -j "$jobs"
for module in "$build"/csrc/bindings/_C.*.so; do ln -sfn "../$module" "smddp/$(basename "$module")"; done
ln -sfn ../$build/csrc/bindings/_build.py smddp/_build.py
echo "built in $SECONDS s"

export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
parallel=()
"$python" -c 'import xdist' 2>/dev/null && parallel=(-n 4)
status=0
# The result of each test is printed as it ends: what a time limit cuts off is not lost.
timeout 330 "$python" -m pytest -v -m gpu "${parallel[@]}" tests/python/test_cuda.py || status=$?
echo "tests ended with $status after $SECONDS s"

for ranks in 2 4; do
  timeout 60 "$python" -m smddp.bench allreduce --memory gpu --backends smddp,gloo --ranks $ranks \
    --min-bytes 1KiB --max-bytes 64MiB --factor 16 || status=$?
done
echo "all ended with $status after $SECONDS s"
exit $status
