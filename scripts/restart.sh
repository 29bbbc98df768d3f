#!/bin/bash
# restart.sh LAUNCHER-LINE: run a line of srun or mpiexec on the hosts of this job but the last $SPARES (0: on
# all, once). If a host is lost, leave it out, take a spare one, and run the line again: train.py resumes.
# A host is lost if the launcher cannot run `true` there. If all hosts answer, it is the one that the watchdog
# names, or on which a signal ended the first rank, as srun or mpiexec says. If a host is silent and no spare
# is left, the exit code is 85: queue the job again.
# Exercised: with a real Slurm and a real PBS, and with stand-ins (docs/cluster.md, tests/test_restart.py).
[ "${SPARES:-0}" = 0 ] && exec "$@"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
printed=$(mktemp) || exit 1
trap 'wait; rm -f "$printed" "$printed".*' EXIT
line=("$@") lost=' ' ended=
trouble='^srun: error|^nanoshard: (hung|rank [0-9]+ )|^Traceback|BAD TERMINATION|on signal [0-9]|[[]proxy'
if [[ $line = *srun ]]; then  # -> all hosts, in order: this script runs on the first; and the ranks on each
    hosts=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
    per=${SLURM_NTASKS_PER_NODE:-$((${SLURM_NTASKS:-${#hosts[@]}} / ${#hosts[@]}))}
else
    hosts=($(awk 'NF && !seen[$1]++ {print $1}' "$PBS_NODEFILE"))
fi
[[ $SPARES =~ ^[0-9]+$ ]] && n=$((${#hosts[@]} - SPARES)) && [ $n -gt 0 ] ||
    die "SPARES=$SPARES: this job has ${#hosts[@]} host(s), and one of them must train"

# The line for the hosts $used -> $now. --max-minutes is that of the whole job; 0 is no limit
set_line() {
    local i
    now=("${line[@]}")
    if [[ $line = *srun ]]; then  # --overlap: what the last step held may not be free yet
        now=("$line" --overlap -N $n -n $((per * n)) -w "$(IFS=,; echo "${used[*]}")" "${line[@]:1}")
        return
    fi
    for i in "${used[@]}"; do awk -v host="$i" '$1 == host' "$PBS_NODEFILE"; done > "$printed.hosts"
    for ((i = 1; i < ${#now[@]}; i++)); do
        case ${now[i - 1]} in
            -n) now[i]=$((now[i] / ${#hosts[@]} * n)) ;;
            -hostfile | --hostfile) hostfile=${now[i - 1]} now[i]=$printed.hosts ;;
            --max-minutes) now[i]=$(awk "BEGIN {m = ${now[i]}; print (m > 0 ? m - $SECONDS / 60 : 0)}") ;;
        esac
    done
}

# The hosts in use on which the launcher runs nothing -> $bad; none if it cannot on the first host either
find_silent() {
    local i host where tried=()
    for host in "$hosts" "${used[@]}"; do
        echo "$host" > "$printed.at.$host"
        where=("$hostfile" "$printed.at.$host")
        [[ $line = *srun ]] && where=(--overlap --mpi=none -N 1 -w "$host")
        timeout -s KILL 5 "$line" -n 1 "${where[@]}" true &> /dev/null < /dev/null &
        tried+=($!)
    done
    wait ${tried[0]} || return 0  # a signal may end wait early: ask twice
    for i in "${!used[@]}"; do wait ${tried[i + 1]} || wait ${tried[i + 1]} || bad+=("${used[i]}"); done
} 2> /dev/null  # what bash says of a launcher that was killed

# The hosts that the watchdog or the launcher named -> $bad
find_named() {
    local host names=$(sed -n 's/^nanoshard: host of .*: //p' "$printed")
    [ -n "$names" ] || names=$(grep -m 1 -E '^=   PID|^srun: error: [^ ]+: tasks? ' "$printed" |
        sed -nE -e 's/.* RUNNING AT //p' -e 's/.*: ([^ ]+): .*: (Killed|Bus error|Segmentation fault).*/\1/p')
    for host in "${used[@]}"; do grep -qE "^${host%%.*}([.]|$)" <<< "$names" && bad+=("$host"); done
}

# Run $now until it ends -> $rc. When something is wrong, ask for silent hosts, and do not wait for them
run_line() {
    local i next=1
    : > "$printed"  # before tail reads it: what the last start printed is not printed again
    "${now[@]}" &> "$printed" < /dev/null &
    pid=$!
    tail -n +1 -s .2 -F --pid=$pid "$printed" 2> /dev/null &
    for ((i = 1; ${#bad[@]} == 0; i++)); do
        sleep .2
        kill -0 $pid 2> /dev/null || break
        [ $i -ge $next ] && tail -c 9999 "$printed" | grep -qE "$trouble" && find_silent && next=$((i + 50))
    done
    if [ ${#bad[@]} -gt 0 ]; then
        kill $pid 2> /dev/null
        for i in {1..5}; do sleep .2; kill -0 $pid 2> /dev/null || break; done; kill -KILL $pid 2> /dev/null
        [[ $line = *srun ]] && scancel $(squeue -hs -j "$SLURM_JOB_ID" -o %i | grep '[.][0-9]')
    fi
    wait $pid; rc=$?
    wait
}
stop() { echo "nanoshard: $*" >&2; exit $rc; }
used=("${hosts[@]:0:n}")
trap 'kill -USR1 $pid' USR1
trap ended=1 TERM  # the job ends
while bad=(); do
    set_line
    run_line
    [[ -n $ended || " 0 2 42 44 85 130 " = *" $rc "* ]] && exit $rc
    [ ${#bad[@]} -gt 0 ] || find_silent
    [ ${#bad[@]} -gt 0 ] && rc=85 why='does not answer' || { find_named; why='was named'; }
    lost+="${bad[*]} " used=()
    for host in "${hosts[@]}"; do [[ ${#used[@]} = $n || $lost = *" $host "* ]] || used+=("$host"); done
    [ ${#bad[@]} -gt 0 ] || stop "exit code $rc, but all hosts answer and none was named: no restart"
    [ ${#used[@]} = $n ] || stop "${bad[*]} $why, and no spare host is left: exit code $rc"
    case " ${line[*]}" in *" --resume "*) find_resume "${line[@]}"; line+=(--resume "$resume") ;; esac
    echo "nanoshard: ${bad[*]} $why: left out. The run starts again on ${used[*]}" >&2
done
