#!/bin/bash
# Show each rank the four GPUs of its node, in the order of the ranks' cores: Polaris numbers its GPUs in the
# reverse order of the NUMA domains. train.py takes the one with its local rank. As all ranks see all four in
# one order, they reach each other's memory. ALCF's script shows a rank one GPU (3 - PMI_LOCAL_RANK % 4):
# train.py then adds the others, but only if MPI_Init has left CUDA alone. Source of the order:
# github.com/argonne-lcf/GettingStarted, Examples/Polaris/affinity_gpu
# Exercised: what it sets (tests/test_scripts.py). Never run on Polaris.
export CUDA_VISIBLE_DEVICES=3,2,1,0
exec "$@"
