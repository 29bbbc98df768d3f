# The PBS job scripts source this file. read_flags, read_hosts, then start SCRIPT COMMAND...: run the command
# with --max-minutes, and submit the job again if it exits with 85. Exercised with a real OpenPBS 23.06
# (docs/cluster.md says how) and with stand-ins that do what it did (tests/test_scripts.py, tests/pbs/).
#
# The walltime: train.py watches it (--max-minutes), because PBS leaves 10 s between TERM and KILL. A signal
# (qsig) also ends the login shell above this one, and with it the job: `touch OUT/stop` instead.
source scripts/common.sh

# ARGS -> the array `flags`. ARGS=@FILE: the flags stand in FILE, as in a shell: quotes, several lines. PBS
# takes the quotes out of ARGS itself and leaves backslashes. Nothing is expanded but {index}.
read_flags() {
    local text=${ARGS:-tiny} words
    case $text in
        @*) text=$(lines_of "${ARGS#@}") || exit 2 ;;
        *\\*) die "PBS took quotes out of ARGS ($text): write the flags into a file, -v ARGS=@FILE" ;;
    esac
    words_of "$text"
    index_flags "${words[@]}"
}

# The line of attribute $1 of this job, from what `qstat -f` printed (its folded lines end in a tab's indent)
attribute() { sed -e ':a' -e 'N;$!ba' -e 's/\n\t//g' <<< "$job" | sed -n "s/^ *$1 = //p"; }

# The walltime -> MINUTES, unless it or --max-minutes is given: a tenth (10 minutes at most) is kept for start
# and end
find_minutes() {
    local h m s left
    job=$(qstat -f "$PBS_JOBID" 2>/dev/null)
    walltime=$(attribute 'Resource_List\.walltime')
    MINUTES=${MINUTES:-$(value_of --max-minutes "${flags[@]}")}
    [ -n "$MINUTES" ] && return
    [ -z "$job" ] && die "qstat does not answer here: qsub -v MINUTES=N, a little less than the walltime"
    [ -z "$walltime" ] && MINUTES=0 && return  # no limit
    IFS=: read -r h m s <<< "$walltime"
    left=$((10#$h * 3600 + 10#$m * 60 + 10#$s))
    left=$((left - (left < 6000 ? left / 10 : 600) - SECONDS))
    [ $left -gt 0 ] || left=1
    MINUTES=$((left / 60)).$(printf %02d $((left % 60 * 100 / 60)))
}

# What qsub was told about this job -> the arrays `options` and `names` (of -v), and the script as typed
same_job() {
    local words i
    names=$(attribute Variable_List | sed -e 's/\\,//g' -e 's/,/\n/g' | sed -n 's/=.*//p' |
        grep -E '^[A-Za-z_][A-Za-z0-9_]*$' | grep -vE '^(PBS_|INDEX$)')
    [ -n "$PBS_ARRAY_INDEX" ] && job=$(qstat -f "${PBS_JOBID/\[*\]/[]}")  # an array's job has no arguments
    read -ra words <<< "$(attribute Submit_arguments)"
    if [ ${#words[@]} = 0 ]; then  # a site may hide them: what most sites ask for
        words=(${PBS_ACCOUNT:+-A "$PBS_ACCOUNT"} ${PBS_O_QUEUE:+-q "$PBS_O_QUEUE"})
        echo "nanoshard: qstat hides what was typed: the next job is $script with this one's account," \
            "queue, resources and variables"
        for i in select place filesystems; do words+=(-l "$i=$(attribute "Resource_List\.$i")"); done
    fi
    options=()
    for ((i = 0; i < ${#words[@]}; i++)); do
        case ${words[i]} in
            -W) i=$((i + 1)); [[ ${words[i]} == *depend=* ]] || options+=(-W "${words[i]}") ;;
            -l) i=$((i + 1)); [[ ${words[i]} =~ ^walltime=[^,]*$|=$ ]] || options+=(-l "${words[i]}") ;;
            -[AaCcejkLMmNoPpqRrSu]) options+=("${words[i]}" "${words[i + 1]}"); i=$((i + 1)) ;;
            -[AaCcejkLlMmNoPpqRrSu]?*) options+=("${words[i]}") ;;
        esac  # not -v, -V (its variables follow by name), -I, nor -J (of an array this job alone)
    done
    [ -n "$walltime" ] && options+=(-l "walltime=$walltime")  # also if qalter has changed it
    [ ${#words[@]} -gt 0 ] && [ -f "${words[-1]}" ] && script=${words[-1]}
    INDEX=${INDEX:-$PBS_ARRAY_INDEX}
    names=$(echo $names ${INDEX:+INDEX} | tr ' ' ,)
}

start() {
    local script=$1 rc pid signalled deleted job walltime options names name typed
    shift
    find_minutes
    share_cores "$(attribute 'Resource_List\.select')"
    scripts/restart.sh "$@" --max-minutes "$MINUTES" &
    pid=$!
    trap 'signalled=1; kill -USR1 $pid' USR1  # where this shell is the first of the job
    trap 'signalled=1; deleted=1' TERM  # qdel, qrerun and the walltime send it to the ranks as well
    while signalled=; wait $pid; rc=$?; [ -n "$signalled" ]; do :; done  # a trap ends wait early: wait again
    [ $rc = 85 ] || exit $rc
    [ -n "$deleted" ] && echo "nanoshard: PBS ends this job, so it is not submitted again" >&2 && exit $rc
    same_job  # stopped after a complete save
    export INDEX  # -v NAME takes its value from here: no comma or blank in it needs a quote
    if ! qsub "${options[@]}" ${names:+-v "$names"} "$script"; then
        typed="cd ${PWD@Q}; "
        for name in ${names//,/ }; do typed+="$name=${!name@Q} "; done  # this job's; there they are not set
        echo "nanoshard: saved, but not submitted again. On a login node:" \
            "${typed}qsub ${options[*]} ${names:+-v $names }$script" >&2
    fi
    exit $rc
}
