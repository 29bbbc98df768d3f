#!/bin/bash -l
#SBATCH --job-name=nanoshard --output=%x-%j.out --open-mode=append
#SBATCH --constraint=gpu --qos=regular --nodes=2 --time=02:00:00
#SBATCH --ntasks-per-node=4 --gpus-per-node=4 --cpus-per-task=32
#SBATCH --signal=USR1@120 --requeue
# Perlmutter (NERSC), 4 A100 per node. Exercised: its commands, with stand-ins for srun, scontrol and module
# (tests/test_scripts.py); it requeues as generic.slurm does, which runs on a real Slurm. Never run on
# Perlmutter: modules, flags and variables follow the site's documentation.
#
#   python -m venv --system-site-packages .venv; .venv/bin/pip install -r requirements-site.txt (with pytorch)
#   sbatch -A ACCOUNT scripts/perlmutter.sh PRESET --steps 2000 ...

cd "$SLURM_SUBMIT_DIR" || exit 1
module load pytorch  # torch, NCCL with its slingshot plugin, mpi4py
source "${VENV:-.venv}/bin/activate"  # bash -l has reset PATH: an environment active at submission is lost
# docs.nersc.gov/machinelearning/pytorch has the modules and the flags of srun
export MPICH_GPU_SUPPORT_ENABLED=0  # MPI sends one address; GPU-aware MPI would need Cray's GTL library
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    export NCCL_SOCKET_IFNAME=hsn NCCL_CROSS_NIC=1 FI_MR_CACHE_MONITOR=userfaultfd
fi

# every rank sees all four GPUs of its node and uses the one with its local rank, so peer access works
srun --wait=60 -c "$SLURM_CPUS_PER_TASK" --gpu-bind=none python train.py "${@:-tiny}" --resume auto
rc=$?
[ $rc = 85 ] && scontrol requeue "$SLURM_JOB_ID"  # saved before the time limit: queue the job again
exit $rc
