#!/bin/bash -l
#SBATCH --job-name=nanoshard --output=%x-%j.out --open-mode=append
#SBATCH --partition=standard-g --nodes=2 --time=02:00:00
#SBATCH --ntasks-per-node=8 --gpus-per-node=8
#SBATCH --signal=USR1@120 --requeue
# LUMI-G, 8 GCDs of MI250X per node. Exercised: its commands, with stand-ins (tests/test_scripts.py); it
# requeues as generic.slurm does, which runs on a real Slurm. Never run on LUMI or on any AMD GPU.
#
#   sbatch -A project_NUMBER scripts/lumi.sh PRESET --steps 2000 ...
#
# MODULES, VENV: torch for ROCm and mpi4py; LUMI's pages recommend a container ([3]); this script starts none.
# [1] github.com/Lumi-supercomputer/lumi-userguide, docs/runjobs/scheduled-jobs/distribution-binding.md, at
#     bad69ac (2024-04-19): 56 cores, the first of every eight is the system's; GCD 0 is beside cores 49-55
# [2] the same commit, docs/runjobs/scheduled-jobs/lumig-job.md: partition, whole nodes,
#     MPICH_GPU_SUPPORT_ENABLED
# [3] the same commit, docs/software/packages/pytorch.md: NCCL_SOCKET_IFNAME, MIOpen's folder

cd "$SLURM_SUBMIT_DIR" && source scripts/common.sh 2> /dev/null ||
    { echo "nanoshard: submit from the repository's root, not $PWD" >&2; exit 2; }
index_flags "${@:-tiny}"
load_modules $MODULES
activate
MIOPEN_USER_DB_PATH=$(mktemp -d) || exit 1
export MIOPEN_USER_DB_PATH MIOPEN_CUSTOM_CACHE_DIR=$MIOPEN_USER_DB_PATH
export MPICH_GPU_SUPPORT_ENABLED=0  # MPI sends one address. 1 is for GPU-aware MPI alone ([2])
[ "$SLURM_JOB_NUM_NODES" -gt 1 ] && export NCCL_SOCKET_IFNAME=hsn  # [3]

# the cores follow the GCDs ([1]): local rank, device and cores agree, and every rank sees all GCDs
masks=fe000000000000,fe00000000000000,fe0000,fe000000,fe,fe00,fe00000000,fe0000000000
scripts/restart.sh srun --wait=60 --cpu-bind=mask_cpu:$masks --gpu-bind=none \
    python train.py "${flags[@]}" --resume "$resume"
rc=$?
[ $rc = 85 ] && scontrol requeue "$SLURM_JOB_ID"  # saved before the time limit: queue the job again
exit $rc
