#!/bin/bash
# gpu_order.sh ORDER COMMAND...: show each rank all GPUs of its node, in the order of the ranks' cores.
# train.py takes the one with its local rank: the GPU beside its cores. As all ranks see all GPUs in one
# order, they reach each other's memory. Sites' own scripts show a rank one GPU. The orders and their sources
# stand in the job scripts. Exercised: what it sets (tests/test_scripts.py). Never run on those machines.
if [ -n "$ROCM_PATH" ]; then
    export HIP_VISIBLE_DEVICES=$1
else
    export CUDA_VISIBLE_DEVICES=$1
fi
shift
exec "$@"
