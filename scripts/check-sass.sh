#!/usr/bin/env bash
# Checks the kernels' machine code (tests/cuda/check_sass.py); installs the disassembler into .venv
# where CUDA's is not there.
# Usage: scripts/check-sass.sh LIBRARY [--table]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH="$PATH:/usr/local/cuda/bin"
if ! command -v cuobjdump > /dev/null || ! command -v nvdisasm > /dev/null; then
  [ -x .venv/bin/python ] || python3 -m venv .venv >&2
  .venv/bin/python -m pip install --quiet --disable-pip-version-check \
    nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm >&2
  PATH="$PATH:$(echo "$PWD"/.venv/lib/python3*/site-packages/nvidia/cu13/bin)"
fi
python3 tests/cuda/check_sass.py "$@"
