# Every job script sources this file. What is wrong becomes one line, and exit code 2.
# Exercised: under a real PBS (docs/cluster.md), `make slurm`, and with stand-ins (tests/test_scripts.py).

die() { echo "nanoshard: $*" >&2; exit 2; }
source "$(dirname "${BASH_SOURCE[0]}")/flags.sh"

# load_modules NAME...: load the site's modules. Without one of them the run would take another Python or MPI.
# `module load` may complain of a module that works (Polaris, since 2026-08): then activate asks python.
load_modules() {
    local name
    [ $# -gt 0 ] || return 0
    type module &> /dev/null ||
        die "no command 'module' here, so $* cannot be loaded${MODULES:+: leave out MODULES}"
    module load "$@" && return
    for name in "$@"; do  # of several, some `is-avail` ask for one alone
        module is-avail "$name" &> /dev/null ||
            die "module load $* failed: MODULES may name others of 'module avail'"
    done
    complained="module load $*"
}

# nccl_settings NODES: source the file NCCL_SETTINGS, if it is named and there are several nodes
nccl_settings() {
    [ "$1" -gt 1 ] && [ -n "$NCCL_SETTINGS" ] || return 0
    [ -r "$NCCL_SETTINGS" ] || die "no file NCCL_SETTINGS=$NCCL_SETTINGS (from $PWD)"
    source "$NCCL_SETTINGS"
}

# Where stage.sh puts its copies on each node: the same name in each job, so that a later one finds them
stage_folder() { echo "${DISK:-/tmp}/nanoshard-$(id -un)"; }

# Activate the environment VENV (.venv). `bash -l` has reset PATH: one that was active at submission is lost.
# VENV=none: the modules have all that is needed. STAGE="FOLDER...": copy the environment and these folders to
# the nodes' own disks first (stage.sh); STAGE=.venv copies the environment alone.
activate() {
    local venv=${VENV:-.venv}
    if [ "$venv" != none ]; then
        [ -r "$venv/bin/activate" ] || die "no environment in '$venv' (from $PWD): make it as" \
            "docs/cluster.md says, name another with VENV=FOLDER, or take the modules' Python with VENV=none"
        source "$venv/bin/activate"
    fi
    if [ -n "$complained" ]; then
        python -c 'import torch' || die "$complained failed, and python finds no torch"
        echo "nanoshard: $complained failed, but python finds torch: going on" >&2
    fi
    [ -n "$STAGE" ] || return
    local folders=($STAGE)
    venv=${venv#"$PWD/"} venv=${venv#"$(pwd -P)/"}  # the copies keep the names that folders have below $PWD
    case /$venv/ in
        //* | */../*) die "STAGE copies what is below $PWD, and VENV=$venv is not: leave out STAGE" ;;
    esac
    [ "$venv" = none ] || [[ " $STAGE " == *" $venv "* ]] || folders+=("$venv")
    scripts/stage.sh "${folders[@]}" || exit
    [ "$venv" = none ] || source "$(stage_folder)/$venv/bin/activate"
}

# read_hosts: set $ranks and $nodes from $PBS_NODEFILE, which has one line with a host per rank
read_hosts() {
    local -x LC_ALL=C  # grep takes any bytes
    local wrong='' n line='^[[:alnum:]._-]*[[:blank:]]*$'  # a host, or blank
    if [ ! -f "$PBS_NODEFILE" ] || [ ! -r "$PBS_NODEFILE" ]; then
        wrong="cannot be read"
    elif n=$(grep -anvE "$line" "$PBS_NODEFILE" | head -n 1 | cut -d: -f1) && [ -n "$n" ]; then
        wrong="is no list of hosts, see line $n"
    elif ! ranks=$(grep -c '[[:alnum:]]' "$PBS_NODEFILE"); then
        wrong="names no host"
    fi
    [ -n "$wrong" ] && die "node file '$PBS_NODEFILE' $wrong; start this in a job (qsub), on its first node"
    nodes=$(tr -d ' \t' < "$PBS_NODEFILE" | sort -u | grep -c .)
}

# even_hosts: stop the job if PBS gave its nodes unlike numbers of ranks, as mpiexec takes one for all
even_hosts() {
    local counts
    counts=$(tr -d ' \t' < "$PBS_NODEFILE" | grep . | sort | uniq -c | awk '{print $2 ": " $1}')
    [ "$(cut -d ' ' -f 2 <<< "$counts" | sort -u | wc -l)" = 1 ] || die "ranks of the nodes differ" \
        "($(paste -sd, <<< "${counts//: /:}")): give each chunk of -l select the same mpiprocs"
}

# mpiexec_line RANKS PER_NODE: set the array `line` to a call of mpiexec on the nodes of the PBS job. Open MPI
# knows no -ppn, binds ranks to cores unless told not to, and gives other nodes only the variables of -x.
mpiexec_line() {
    local name
    line=(mpiexec -n "$1" -ppn "$2" -hostfile "$PBS_NODEFILE")  # MPICH, Intel MPI
    case $(mpiexec --version 2>/dev/null < /dev/null) in
        *PALS* | *pals*) line=(mpiexec -n "$1" --ppn "$2" --hostfile "$PBS_NODEFILE") ;;  # Cray
        *"Open MPI"* | *OpenRTE*)
            line=(mpiexec -n "$1" --npernode "$2" --hostfile "$PBS_NODEFILE" --bind-to none)
            for name in $(compgen -e); do
                case $name in
                    PATH | LD_LIBRARY_PATH | PYTHON* | OMP_* | NCCL_* | UCX_* | *_proxy) line+=(-x "$name") ;;
                esac
            done ;;
    esac
}

# share_cores SELECT: PBS sets OMP_NUM_THREADS to all cores of a chunk, also where mpiprocs ranks share it,
# and whatever -v says. Give each rank its share, unless the job asked for a number (ompthreads).
share_cores() {
    if [[ $1 =~ mpiprocs=([0-9]+) && $1 != *ompthreads* && $OMP_NUM_THREADS = "$NCPUS" ]]; then
        export OMP_NUM_THREADS=$((NCPUS > BASH_REMATCH[1] ? NCPUS / BASH_REMATCH[1] : 1))
    fi
}
