# Sourced by the PBS job scripts. start SCRIPT COMMAND...: run it, pass signals on, submit SCRIPT again on
# 85. Exercised for real with mpich's mpiexec (tests/test_scripts.py); qsub is a stand-in there: no PBS is
# packaged.
#
# The walltime: train.py counts it itself (--max-minutes), for PBS leaves a few seconds between TERM and
# KILL. Signals: `qsig -s USR1 JOB` reaches this shell, which passes it to mpiexec and that to the ranks.
# Whether PALS' mpiexec (Polaris, Aurora) does so too was not tried.

start() {
    local script=$1 pid rc signalled
    shift
    "$@" &
    pid=$!
    trap 'signalled=1; kill -USR1 $pid' USR1 TERM
    while signalled=; wait $pid; rc=$?; [ -n "$signalled" ]; do :; done  # a trap ends wait early: once more
    if [ $rc = 85 ]; then  # stopped after a complete save
        if command -v qsub; then
            qsub -v "ARGS=$ARGS,VENV=$VENV,MINUTES=$MINUTES" "$script"
        else
            echo "saved, but there is no qsub on this node: submit again, or a chain up front:" \
                "qsub -W depend=afterany:$PBS_JOBID $script"
        fi
    fi
    exit $rc
}
