#!/usr/bin/env bash
# Does the wheel in dist/ work where there is nothing but Python? For each release of a framework given:
#
#   tests/wheels/run.sh torch==2.11 torch==2.13 torch==2.15 tensorflow-cpu==2.21
#
# a new environment, moved to another folder; then, as a user without rights, with a home that cannot be written, 1 MiB of
# /dev/shm, neither a compiler nor libfabric: training on 2x2 ranks equals gloo's, or that of one process of TensorFlow, and
# what pip uninstalls is gone. With TensorFlow also once with a compiler. Needs root, for the name spaces. The environments
# take some GB each; they are removed in the end.
set -euo pipefail
cd "$(dirname "$0")/../.."
[ "$(id -u)" = 0 ] || { echo "tests/wheels/run.sh: run it as root" >&2; exit 1; }
wheels=(dist/smddp-*-"$(python3 -c 'import sys; print("cp%d%d" % sys.version_info[:2])')"-*.whl)
[ ${#wheels[@]} = 1 ] && [ -f "${wheels[0]}" ] || { echo "tests/wheels/run.sh: dist/ has not exactly one wheel; run \`make wheels\`" >&2; exit 1; }
wheel=$PWD/${wheels[0]}

base=$(python3 -c 'import sys; print(sys.base_prefix)')

# What the user without rights sees of the host. $1: the environment.
inside() {
  local environment=$1
  shift
  rm -rf "$environment.python"
  unshare --mount --net bash -c '
    set -euo pipefail
    ip link set lo up
    mount -t tmpfs -o size=1m,mode=1777 tmpfs /dev/shm
    for library in $(ldconfig -p | grep -o "/[^ ]*libfabric[^ ]*$"); do mount --bind /dev/null "$library"; done
    # Python may lie in the home of root, which others cannot enter.
    if [[ $1 = /root/* ]]; then
      mkdir "$0.python"
      mount --bind "$1" "$0.python"
      mount -t tmpfs -o mode=755 tmpfs /root
      mkdir -p "$1"
      mount --move "$0.python" "$1"
    fi
    shift
    cd /
    exec setpriv --reuid=65534 --regid=65534 --clear-groups --no-new-privs \
      env -i PATH="$0/bin" HOME=/proc OMP_NUM_THREADS=1 "$@"' "$environment" "$base" "$@"
}

# What is to be tested with torch. $1: the environment.
try_torch() {
  inside "$1" "$1/bin/python" -m torch.distributed.run --nproc-per-node 4 "$folder/train_torch.py"
  inside "$1" "$1/bin/python" -c '
import importlib.metadata, shutil, smddp, smdistributed.modelparallel.torch, smdistributed.dataparallel.torch.torch_smddp
assert shutil.which("c++") is None and shutil.which("g++") is None
assert importlib.metadata.version("smddp") == smddp.__version__ == importlib.metadata.version("smdistributed")
'
}

# Without torch, mpirun or srun starts ranks; here a shell sets their variables. $1: the environment.
try_tensorflow() {
  local compiler how
  for how in numpy compiled; do
    # g++ calls programs by name.
    compiler=
    [ $how = numpy ] || compiler=:/usr/bin:/bin
    # shellcheck disable=SC2016
    inside "$1" PATH="$1/bin$compiler" MASTER_ADDR=127.0.0.1 MASTER_PORT=29507 WORLD_SIZE=4 LOCAL_WORLD_SIZE=4 \
      /bin/bash -c '
      for rank in 0 1 2 3; do
        RANK=$rank LOCAL_RANK=$rank python "$@" &
        ranks+=($!)
      done
      for rank in "${ranks[@]}"; do wait "$rank" || failed=1; done
      exit ${failed:-0}' bash "$folder/train_tensorflow.py" $how
  done
}

# $1: a framework of a release, like torch==2.15
check() {
  rm -rf "$folder"/*
  python3 -m venv "$folder/made"
  "$folder/made/bin/python" -m pip install --quiet "$1.*" numpy
  (cd "$folder/made" && find . -not -path '*/__pycache__*' | sort) >"$folder/before"
  "$folder/made/bin/python" -m pip install --quiet --no-deps "$wheel"
  mv "$folder/made" "$folder/moved"
  cp tests/wheels/*.py "$folder"
  case "$1" in
    torch==*) try_torch "$folder/moved" ;;
    *) try_tensorflow "$folder/moved" ;;
  esac
  "$folder/moved/bin/python" -m pip uninstall --quiet --yes smddp
  (cd "$folder/moved" && find . -not -path '*/__pycache__*' | sort) >"$folder/after"
  diff "$folder/before" "$folder/after" || { echo "$1: uninstalling smddp has left what is listed above" >&2; return 1; }
}

folder=$(mktemp -d /tmp/smddp-wheel.XXXXXX)
trap 'rm -rf "$folder"' EXIT
chmod 755 "$folder"
for framework in "$@"; do check "$framework"; done
