#!/bin/bash
# A job of two nodes and a spare one; the second node dies (root, OpenPBS; a minute or two):
#
#   NODES=3 tests/pbs/namespace.sh tests/pbs/lost_node.sh
#
# VENV is the environment's folder (.venv). The run must leave the node out, train on with the spare one, and end
# with the weights of a run that lost nothing. Prints the seconds, and what the job printed.
set -eu
out=$(mktemp -d)
chmod 755 "$out"
VENV=$(realpath "${VENV:-.venv}")
tiny="tiny --data synthetic --seq-len 64 --eval-every 0 --no-plot --no-report --steps 120 --log-every 5 --save-every 40"
mkdir "$out/bin"  # pip's mpiexec starts a node's ranks through ssh
cat > "$out/bin/ssh" <<'END'
#!/bin/bash
while [[ $1 = -* ]]; do shift; done
exec pbs_tmrsh "$1" bash -c "${*:2}"
END
chmod 755 "$out/bin/ssh"

run() {  # FOLDER NODES: submit a job of which two nodes train, and set $job. OFI: UCX finds no way between the nodes
    local nodes=$2
    echo "$tiny --out $out/$1" > "$out/$1.flags"
    job=$(qsub -j oe -o "$out/$1.txt" -k oed -l select=$nodes:ncpus=1:mpiprocs=1 -l place=scatter \
        -l walltime=0:20:00 \
        -v "ARGS=@$out/$1.flags,VENV=$VENV,SPARES=$((nodes - 2)),OMP_NUM_THREADS=1,MPIR_CVAR_CH4_NETMOD=ofi,HYDRA_LAUNCHER_EXEC=$out/bin/ssh" scripts/generic.pbs)
}
ended() { ! qstat "$job" > /dev/null 2>&1; }
printed() { grep -rqs "$2" "$out/$1.txt" /var/spool/pbs/spool ~/*.o"${job%%.*}"; }

run lost 3
until [ -e "$out/lost/step_000080" ] || ended; do sleep 0.2; done
ended && { cat "$out/lost.txt"; exit 1; }
kill -KILL "$(< /var/spool/pbs/node2)"
start=$(date +%s.%N)
since() { awk "BEGIN {printf \"%.1f\", $(date +%s.%N) - $start}"; }
echo "pbs2 is killed"
until printed lost "starts again" || ended; do sleep 0.1; done
echo "left out after $(since) s"
until printed lost "^resumed" || ended; do sleep 0.1; done
echo "resumed after $(since) s"
until ended; do sleep 0.5; done
qstat -fx "$job" | grep -E "Exit_status|run_count"
cat "$out/lost.txt"
[ "$(grep -c "^step=1 " "$out/lost.txt")" = 1 ]  # nothing is printed twice
run whole 2
until ended; do sleep 0.5; done
"$VENV/bin/python" checkpoint.py diff "$out/lost/step_000120" "$out/whole/step_000120"
rm -rf "$out"
