#!/bin/bash
# here.sh ARGS: train inside an allocation that you already have (qsub -I, salloc, a notebook's terminal), or
# on this machine alone. Finds scheduler, nodes and GPUs, prints the launcher's line, and runs it.
#
#   scripts/here.sh tiny --steps 500          ARGS are train.py's
#   RANKS=2 scripts/here.sh tiny              ranks per node, instead of one per GPU
#   SITE=polaris scripts/here.sh tiny         a site's binding, where the node's name does not say it
#   DRY=1 scripts/here.sh tiny                only print
#   RUN="python bench/doctor.py" scripts/here.sh
#
# It loads no module and activates no environment, except .venv if no environment is active: do that first, as
# the site's job script does. Exercised: typed inside `qsub -I` of a real OpenPBS and `salloc` of a real Slurm
# (docs/cluster.md), and without a scheduler; the sites' lines with stand-ins
# (tests/test_scripts.py). Sources of the bindings and variables: the job scripts.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
source scripts/common.sh

# Nodes, and where their list comes from -> $scheduler, $nodes, $slots (ranks that were asked for, per node).
# A second shell of a PBS job may know the job's name alone.
[ -n "$PBS_JOBID" ] && export PBS_NODEFILE=${PBS_NODEFILE:-${PBS_HOME:-/var/spool/pbs}/aux/$PBS_JOBID}
if [ -n "$PBS_NODEFILE" ]; then
    scheduler=PBS
    read_hosts
    slots=$((ranks / nodes))
elif [ -n "$SLURM_JOB_ID" ]; then
    scheduler=Slurm
    nodes=${SLURM_JOB_NUM_NODES:-1}
    slots=${SLURM_NTASKS_PER_NODE:-$((${SLURM_NTASKS:-$nodes} / nodes))}
else
    scheduler='no scheduler' nodes=1 slots=1
fi

# The GPUs of this node; all nodes are taken to be alike
gpus=$({ nvidia-smi -L || rocm-smi --showid | grep -o '^GPU\[[0-9]*\]' | sort -u; } 2>/dev/null | grep -c .)
if [ -z "$SITE" ]; then  # a word that the system sets, or one in the name of a node of ALCF or OLCF
    host=$(hostname -f 2>/dev/null)
    case $host in *.alcf.anl.gov | *.olcf.ornl.gov) ;; *) host='' ;; esac
    words=" ${LMOD_SYSTEM_NAME:-$NERSC_HOST} $SLURM_CLUSTER_NAME ${host//[^a-z]/ } "
    for name in polaris aurora perlmutter frontier lumi crux sophia; do
        case $words in *" $name "*) SITE=$name ;; esac
    done
fi
[ "$SITE" = aurora ] && gpus=12  # tiles
full=$gpus  # the ranks of a full node
[ "$SITE" = crux ] && full=8  # NUMA domains
ranks=${RANKS:-$([ "$full" -gt 0 ] && echo "$full" || echo "$slots")}
[[ $ranks =~ ^[1-9][0-9]*$ ]] || die "RANKS=$ranks: ranks per node, 1 or more"

# The line: a launcher, its binding, the order of the GPUs
order=()
case $SITE in
    polaris) binding=(--depth 8 --cpu-bind depth); order=(scripts/gpu_order.sh 3,2,1,0)
        export MPICH_GPU_SUPPORT_ENABLED=0 OMP_NUM_THREADS=8; source scripts/polaris_nccl.sh ;;
    aurora) binding=(--cpu-bind list:4-7:8-11:12-15:16-19:20-23:24-27:56-59:60-63:64-67:68-71:72-75:76-79)
        export ZE_FLAT_DEVICE_HIERARCHY=FLAT OMP_NUM_THREADS=4 ;;
    crux) binding=(--depth 16 --cpu-bind depth); export OMP_NUM_THREADS=16 ;;
    sophia) binding=(); export OMP_NUM_THREADS=16 ;;
    perlmutter) binding=(-c 32 --gpu-bind=none); order=(scripts/gpu_order.sh 3,2,1,0)
        export MPICH_GPU_SUPPORT_ENABLED=0 ;;
    frontier) binding=(-c 7 --gpu-bind=none); order=(scripts/gpu_order.sh 4,5,2,3,6,7,0,1)
        export MPICH_OFI_NIC_POLICY=BLOCK ;;
    lumi) masks=fe000000000000,fe00000000000000,fe0000,fe000000,fe,fe00,fe00000000,fe0000000000
        binding=("--cpu-bind=mask_cpu:$masks" --gpu-bind=none); export MPICH_GPU_SUPPORT_ENABLED=0 ;;
    '') binding=(); [ "$scheduler" = Slurm ] && [ "$gpus" -gt 0 ] && binding=(--gpu-bind=none) ;;
    *) die "SITE=$SITE: polaris, aurora, crux, sophia, perlmutter, frontier or lumi; without: no binding" ;;
esac
case $SITE in polaris | aurora | crux | sophia) source scripts/alcf_proxy.sh ;; esac
[ "$nodes" -gt 1 ] && case $SITE in  # what the network asks for
    aurora) export CCL_PROCESS_LAUNCHER=pmix CCL_ATL_TRANSPORT=mpi CCL_KVS_MODE=mpi
        export FI_MR_CACHE_MONITOR=userfaultfd
        [ "$ranks" = "$full" ] && export CCL_WORKER_AFFINITY=42,43,44,45,46,47,94,95,96,97,98,99 ;;
    perlmutter) export NCCL_SOCKET_IFNAME=hsn NCCL_CROSS_NIC=1 FI_MR_CACHE_MONITOR=userfaultfd ;;
    lumi) export NCCL_SOCKET_IFNAME=hsn ;;
esac
# a binding names cores for a full node
[ -n "$SITE" ] && [ "$ranks" != "$full" ] && binding=() order=()
[ -z "$VIRTUAL_ENV$CONDA_PREFIX" ] && activate
if [ "$scheduler" = Slurm ]; then
    line=(srun -N "$nodes" "--ntasks-per-node=$ranks" -n $((nodes * ranks)) "--wait=${WAIT:-60}")
    line+=("${binding[@]}")
elif [ "$nodes" = 1 ] && [ "$ranks" = 1 ]; then
    line=()
else
    command -v mpiexec > /dev/null || die "no mpiexec: load the site's MPI, or pip install mpich"
    if [ "$scheduler" = PBS ]; then
        mpiexec_line $((nodes * ranks)) "$ranks"
        line+=("${binding[@]}")
    else
        line=(mpiexec -n "$ranks")
    fi
fi
line+=("${order[@]}" ${RUN:-python train.py} "$@")
echo "$scheduler${SITE:+ at $SITE}: $nodes node(s), $gpus GPU(s) and $ranks rank(s) on each"
printf '%q ' "${line[@]}"
echo
[ -n "$DRY" ] && exit 0
"${line[@]}"
