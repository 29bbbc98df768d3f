#!/bin/bash
# Give each rank the GPU next to its cores: Polaris numbers its GPUs in the reverse order of the NUMA domains.
# Exercised: the arithmetic (tests/test_scripts.py). After ALCF's documentation; never run on Polaris.
export CUDA_VISIBLE_DEVICES=$((3 - PMI_LOCAL_RANK % 4))
exec "$@"
