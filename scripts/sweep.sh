#!/bin/bash
# sweep.sh FILE ARGS...: train once for each line of FILE, whose flags follow ARGS, and print one table.
#
#   scripts/sweep.sh rates.txt tiny --steps 500       rates.txt:  --lr 0.001
#                                                                 --lr 0.003 --seed 7
# The second run is in out/rates/2, unless its line has an --out. Lines that begin with # are left out.
# A run begins when the one before has ended, on all that here.sh finds inside an allocation or on a machine.
# Typed again, the sweep goes on where it was stopped (exit code 85). A run that fails ends no other.
#
# As a job array, the runs side by side; afterwards python train.py --list out/rates:
#   qsub -A PROJECT -J 1-2 -v SWEEP=rates.txt,ARGS="tiny --steps 500" scripts/generic.pbs
#   SWEEP=rates.txt sbatch -A ACCOUNT --array=1-2 scripts/generic.slurm tiny --steps 500
#
# Exercised: on two real ranks, and both arrays with stand-ins (tests/test_stage.py).
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ $# -gt 0 ] || die "sweep.sh FILE ARGS...: which file? a line of flags for each run"
[ -r "$1" ] || die "no file '$1' to read (from $PWD)"
file=$(realpath "$1")
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
[ -n "$VIRTUAL_ENV$CONDA_PREFIX" ] || activate
lines=$(lines_of "$file") || exit 2
runs=$(wc -l <<< "$lines")
failed=''
for ((run = 1; run <= runs; run++)); do
    sweep_flags "$file" $run
    echo "run $run of $runs: ${words[*]}"
    find_resume "$@" "${words[@]}"
    scripts/here.sh "$@" "${words[@]}" --resume "$resume" < /dev/null
    rc=$?
    [ $rc = 85 ] && echo "stopped in run $run of $runs; type the same to go on" && break
    [ $rc = 0 ] || failed+=" $run ($rc)"
done
out=out/$(basename "${file%.*}")
[ ! -d "$out" ] || python train.py --list "$out"
[ -z "$failed" ] || die "these runs failed, with their exit codes:$failed"
exit $rc
