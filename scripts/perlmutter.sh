#!/bin/bash -l
#SBATCH --job-name=nanoshard --output=%x-%j.out --open-mode=append
#SBATCH --constraint=gpu --qos=regular --nodes=2 --time=02:00:00
#SBATCH --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=32
#SBATCH --signal=USR1@120 --requeue
# Perlmutter (NERSC), 4 A100 per node. Exercised: its commands, with stand-ins (tests/test_scripts.py); it
# requeues as generic.slurm does, which runs on a real Slurm. Never run on Perlmutter.
#
#   python -m venv --system-site-packages .venv; .venv/bin/pip install -r requirements-site.txt (with pytorch)
#   sbatch -A ACCOUNT scripts/perlmutter.sh PRESET --steps 2000 ...
#
# [1] docs.nersc.gov/machinelearning/pytorch, as of 2026-08: the module, the flags of srun
# [2] GPUs are numbered against the tasks' cores: WarpX's and ERF's scripts for Perlmutter set
#     CUDA_VISIBLE_DEVICES=$((3-SLURM_LOCALID)), as of 2026-08
# Unsourced: the lines with #SBATCH, and each line below that says so. No page and day were noted for them,
# and none was found again.

cd "$SLURM_SUBMIT_DIR" && source scripts/common.sh 2> /dev/null ||
    { echo "nanoshard: submit from the repository's root, not $PWD" >&2; exit 2; }
index_flags "${@:-tiny}"
load_modules ${MODULES:-pytorch}  # torch, NCCL with its slingshot plugin, mpi4py ([1])
activate
export MPICH_GPU_SUPPORT_ENABLED=0  # MPI sends one address; GPU-aware MPI would need Cray's GTL
# library (unsourced for Perlmutter)
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    export NCCL_SOCKET_IFNAME=hsn NCCL_CROSS_NIC=1 FI_MR_CACHE_MONITOR=userfaultfd  # unsourced
fi

# every rank sees all four GPUs, in the order of the ranks' cores ([2]), so peer access works
scripts/restart.sh srun --wait=60 -c "$SLURM_CPUS_PER_TASK" --gpu-bind=none scripts/gpu_order.sh 3,2,1,0 \
    python train.py "${flags[@]}" --resume "$resume"
rc=$?
[ $rc = 85 ] && scontrol requeue "$SLURM_JOB_ID"  # saved before the time limit: queue the job again
exit $rc
