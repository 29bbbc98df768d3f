#!/bin/bash -l
#SBATCH --job-name=nanoshard --output=%x-%j.out --open-mode=append
#SBATCH --partition=batch --nodes=2 --time=02:00:00
#SBATCH --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=7
#SBATCH --signal=USR1@120 --requeue
# Frontier (OLCF), 8 GCDs of MI250X per node. Exercised: its commands, with stand-ins for srun, scontrol and
# module (tests/test_scripts.py); it requeues as generic.slurm does, which runs on a real Slurm. Never run on
# Frontier or on any AMD GPU: modules, flags and variables follow the site's documentation.
#
#   sbatch -A ACCOUNT scripts/frontier.sh PRESET --steps 2000 ...
# AWS_OFI_NCCL: the folder of a network plugin of your own, instead of the site's module

cd "$SLURM_SUBMIT_DIR" || exit 1
module load rocm
source "${VENV:-.venv}/bin/activate"  # bash -l has reset PATH: an environment active at submission is lost
export MIOPEN_USER_DB_PATH=/tmp/miopen-$SLURM_JOB_ID MIOPEN_CUSTOM_CACHE_DIR=/tmp/miopen-$SLURM_JOB_ID
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then  # RCCL reads the variables of NCCL
    # without the plugin RCCL uses sockets (docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html)
    [ -z "$AWS_OFI_NCCL" ] && module load rccl-net-plugin
    [ -n "$AWS_OFI_NCCL" ] && export LD_LIBRARY_PATH=$AWS_OFI_NCCL:$LD_LIBRARY_PATH
    # github.com/olcf/olcf-user-docs/issues/947: with the default memhooks RCCL can hang
    export FI_MR_CACHE_MONITOR=userfaultfd FI_CXI_DEFAULT_CQ_SIZE=131072 FI_CXI_DEFAULT_TX_SIZE=2048
    export NCCL_SOCKET_IFNAME=hsn0 NCCL_CROSS_NIC=1 NCCL_NET_GDR_LEVEL=3
fi

# every rank sees all GCDs of its node and uses the one with its local rank. the site's --gpu-bind=closest
# would show it one alone
srun --wait=60 -c "$SLURM_CPUS_PER_TASK" --gpu-bind=none python train.py "${@:-tiny}" --resume auto
rc=$?
[ $rc = 85 ] && scontrol requeue "$SLURM_JOB_ID"  # saved before the time limit: queue the job again
exit $rc
