# The PBS job scripts source this file. start SCRIPT COMMAND...: run the command, pass signals on, submit
# SCRIPT again if it exits with 85. Exercised for real with mpich's mpiexec (tests/test_scripts.py), where
# qsub is a stand-in: no PBS is packaged.
#
# The walltime: train.py watches it (--max-minutes), because PBS leaves only a few seconds between TERM and
# KILL. Signals: `qsig -s USR1 JOB` reaches this shell, the shell passes it to mpiexec, and mpiexec to the
# ranks. Whether the mpiexec of PALS (Polaris, Aurora) passes it on was not tried.

# $PBS_NODEFILE, one line with a host per rank -> $ranks, $nodes. No such list: one line, exit code 2
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
    [ -n "$wrong" ] && echo "nanoshard: node file '$PBS_NODEFILE' $wrong; start this with qsub" >&2 && exit 2
    nodes=$(tr -d ' \t' < "$PBS_NODEFILE" | sort -u | grep -c .)
}

start() {
    local script=$1 pid rc signalled
    shift
    "$@" &
    pid=$!
    trap 'signalled=1; kill -USR1 $pid' USR1 TERM
    while signalled=; wait $pid; rc=$?; [ -n "$signalled" ]; do :; done  # a trap ends wait early: wait again
    if [ $rc = 85 ]; then  # stopped after a complete save
        if command -v qsub; then
            qsub -v "ARGS=$ARGS,VENV=$VENV,MINUTES=$MINUTES" "$script"
        else
            echo "saved, but there is no qsub on this node: submit again, or submit a chain of jobs first:" \
                "qsub -W depend=afterany:$PBS_JOBID $script"
        fi
    fi
    exit $rc
}
