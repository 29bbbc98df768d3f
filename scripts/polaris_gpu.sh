#!/bin/bash
# One GPU per rank, the one next to its cores: on Polaris the GPUs are numbered against the NUMA domains.
# Exercised: the arithmetic (tests/test_scripts.py). From ALCF's documentation, not run on Polaris.
export CUDA_VISIBLE_DEVICES=$((3 - PMI_LOCAL_RANK % 4))
exec "$@"
