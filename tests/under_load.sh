#!/usr/bin/env bash
# Four tests that wait for other processes, beside busy neighbours: bash tests/under_load.sh ROUNDS LOOPS
#
# The four run at once, each ROUNDS times, beside LOOPS Python processes that never wait. Each run prints its exit
# code and its seconds; one that fails also what pytest said last. The exit code is 1 if a run failed.
set -u
rounds=${1:?give ROUNDS LOOPS, such as 20 24}
loops=${2:?give ROUNDS LOOPS, such as 20 24}
cd "$(dirname "$0")/.." || exit 2
tests=(
  tests/test_files.py::test_resume_auto_waits_for_a_run_that_is_leaving
  tests/test_watch.py::test_a_hang_under_mpiexec_has_the_same_exit_code
  tests/test_watch.py::test_a_slow_rank_is_named
  tests/test_faults.py::test_quick_calls_keep_their_workers
)

busy=()
trap '[ ${#busy[@]} -eq 0 ] || kill "${busy[@]}"' EXIT
trap 'exit 1' INT TERM
for _ in $(seq "$loops"); do
  python3 -S -c 'while True: pass' &
  busy+=($!)
done

repeat() {  # a test, ROUNDS times. Its exit code is 1 if one of the runs failed
  local failed=0 said code start
  for _ in $(seq "$rounds"); do
    start=$SECONDS
    said=$(python -m pytest -q -p no:cacheprovider "$1" 2>&1) && code=0 || code=$?
    echo "exit code $code, $((SECONDS - start)) s: $1"
    [ "$code" -eq 0 ] || { failed=1; tail -n 20 <<< "$said"; }
  done
  return "$failed"
}

running=()
for test in "${tests[@]}"; do repeat "$test" & running+=($!); done
failed=0
for pid in "${running[@]}"; do wait "$pid" || failed=1; done
exit "$failed"
