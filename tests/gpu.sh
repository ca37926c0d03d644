#!/usr/bin/env bash
# The tests marked gpu on a GPU host, from the repository root: tests/gpu.sh [pytest arguments]
set -euo pipefail
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
exec python3 -m pytest -p no:cacheprovider -m gpu tests/test_gpu.py -v "$@"
