#!/bin/bash -l
#SBATCH --job-name=nanoshard --output=%x-%j.out --open-mode=append
#SBATCH --partition=batch --nodes=2 --time=02:00:00
#SBATCH --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=7
#SBATCH --signal=USR1@120 --requeue --network=disable_rdzv_get
# Frontier (OLCF), 8 GCDs of MI250X per node. Exercised: its commands, with stand-ins (tests/test_scripts.py);
# it requeues as generic.slurm does, which runs on a real Slurm. Never run on Frontier or on any AMD GPU.
#
#   sbatch -A ACCOUNT scripts/frontier.sh PRESET --steps 2000 ...
#
# MODULES: other modules than those of [1], which go with torch 2.10 for ROCm 7.1.1 in VENV.
# [1] github.com/olcf/olcf-user-docs, software/analytics/pytorch_frontier.rst, at f0571fe (2026-07-07):
#     modules, network option, plugin, mpi4py, MIOpen's folder (others could make theirs first: a fixed name)
# [2] the same commit, systems/frontier_user_guide.rst: partition, -c 7; cores 0-7 are beside GCD 4, and so on

cd "$SLURM_SUBMIT_DIR" && source scripts/common.sh 2> /dev/null ||
    { echo "nanoshard: submit from the repository's root, not $PWD" >&2; exit 2; }
index_flags "${@:-tiny}"
load_modules ${MODULES:-PrgEnv-gnu/8.7.0 cpe/26.03 miniforge3/23.11.0-0 rocm/7.1.1 craype-accel-amd-gfx90a}
export LD_LIBRARY_PATH=$CRAY_LD_LIBRARY_PATH:$LD_LIBRARY_PATH  # another CPE than the default ([1])
activate
MIOPEN_USER_DB_PATH=$(mktemp -d) || exit 1
export MIOPEN_USER_DB_PATH MIOPEN_CUSTOM_CACHE_DIR=$MIOPEN_USER_DB_PATH
# mpi4py after torch can end in MPI_Init, "not confined to a single NUMA node" ([1], where mpi4py is to be
# imported first). [2] says that this variable changes the policy; the value BLOCK is unsourced
export MPICH_OFI_NIC_POLICY=BLOCK
# without the plugin RCCL uses sockets. It sets NCCL's and libfabric's variables: none follows ([1])
[ "$SLURM_JOB_NUM_NODES" -gt 1 ] && load_modules rccl-net-plugin

# every rank sees all GCDs, in the order of the ranks' cores ([2]); --gpu-bind=closest would show it one alone
scripts/restart.sh srun --wait=60 -c "$SLURM_CPUS_PER_TASK" --gpu-bind=none \
    scripts/gpu_order.sh 4,5,2,3,6,7,0,1 python train.py "${flags[@]}" --resume "$resume"
rc=$?
[ $rc = 85 ] && scontrol requeue "$SLURM_JOB_ID"  # saved before the time limit: queue the job again
exit $rc
