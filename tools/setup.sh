#!/usr/bin/env bash
# Makes a bare machine ready, and does nothing slow the second time. Every make target starts here.
#
#   tools/setup.sh packages      system packages (Debian, Ubuntu)
#   tools/setup.sh environment   + the virtual environment .venv with torch
#   tools/setup.sh build         + the C++ core, its tests and the module, in build/torch-<release>
#   tools/setup.sh               + `import smddp` works in .venv
#   tools/setup.sh core <folder> <target> [cmake option...]   a target of the core alone, without torch
#   tools/setup.sh fuzzers <folder>   the fuzzers, compiled by clang
#   tools/setup.sh lint          what `make lint` needs
#
# TORCH=2.11 picks another torch release; it gets an environment and a build folder of its own.
# PYTHON picks the interpreter that the environment is made from.
set -euo pipefail
cd "$(dirname "$0")/.."

default_torch=2.15
torch=${TORCH:-$default_torch}
python=${PYTHON:-python3}
venv=.venv
[ "$torch" = "$default_torch" ] || venv=.venv-$torch
build=build/torch-$torch

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

install_packages() {
  # Other distributions name their packages differently; there CMake says what is missing.
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
  # Keyed by everything that decides what is inside.
  local key stamp=$venv/.requirements
  key=$({ echo "torch $torch"; cat tools/requirements.txt; } | sha256sum)
  [ "$(cat $stamp 2>/dev/null)" != "$key" ] || return 0
  [ -x $venv/bin/python ] || "$python" -m venv $venv
  say "installing torch $torch and the Python packages into $venv (several GB the first time)"
  $venv/bin/python -m pip install --quiet "torch==$torch.*" -r tools/requirements.txt
  echo "$key" >$stamp
}

# What compile() builds.
target=all

# Object files depend neither on where the clone lies nor on the folder they are compiled in, so a
# second clone finds them in the cache. SLOPPINESS: what ccache asks for before it keeps what was compiled
# with a precompiled header.
compile() {
  local folder=$1
  shift
  [ -f "$folder/build.ninja" ] || cmake -S . -B "$folder" -G Ninja \
    -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DSMDDP_QUICK_BUILD=ON "$@"
  CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1 CCACHE_SLOPPINESS=pch_defines,time_macros \
    cmake --build "$folder" --target "$target"
}

build() {
  environment
  compile $build -DPYTHON_EXECUTABLE="$PWD/$venv/bin/python"
}

core() {
  packages
  local folder=$1
  target=$2
  shift 2
  compile "$folder" "$@"
}

fuzzers() {
  packages
  # The package `clang` alone leaves the fuzzer's run-time library out.
  install_packages clang libclang-rt-dev
  target=fuzzers
  compile "$1" -DCMAKE_CXX_COMPILER=clang++ -DSMDDP_FUZZ=ON -DSMDDP_SANITIZE=address,undefined \
    -DSMDDP_BUILD_TESTS=OFF
}

develop() {
  target=_C
  build
  local key stamp=$venv/.development-install module
  key=$({ ls -d smddp smdistributed; cat setup.py pyproject.toml cmake/torch_facts.py; } | sha256sum)
  if [ "$(cat $stamp 2>/dev/null)" != "$key" ]; then
    say "installing smddp into $venv in development mode"
    # setuptools warns about every editable install.
    PYTHONWARNINGS=ignore \
      $venv/bin/python -m pip install --quiet --no-build-isolation --no-deps --editable .
    echo "$key" >$stamp
  fi
  # A link instead of the copy that pip made: the next build is in force at once, and switching
  # between two torch releases costs nothing.
  module=$(cd $build/csrc/bindings && ls _C.*.so)
  ln -sfn "../$build/csrc/bindings/$module" "smddp/$module"
  ln -sfn "../$build/csrc/bindings/_build.py" smddp/_build.py
}

lint() {
  environment
  install_packages clang-format clang-tidy
}

case "${1:-develop}" in
  packages | environment | build | core | fuzzers | develop | lint) "${@:-develop}" ;;
  *) die "unknown step $1" ;;
esac
