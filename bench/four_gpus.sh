#!/usr/bin/env bash
# All rows of four GPUs, one command: bench/four_gpus.sh [--print] [--gpus N] [--data DIR] [--out DIR]
#
# It measures speed, scaling and layouts, and shows that layouts are right over NCCL, on four GPUs of one host.
# Each row of bench/speed.py stands beside the time that plan.py expects. A row that fails is named at the end;
# the others go on. DIR/NAME.log keeps what each command printed, DIR/speed.jsonl the rows of speed.py.
# --data is a folder of prepare.py with at most 128,256 symbols, whose text is what the experts' rows want:
#     python prepare.py stdlib --vocab-size 32768 --with-tests
# --print prints the commands alone. --gpus 2 runs what two GPUs can. The whole was not run yet on four GPUs; its
# commands are checked by tests/test_bench.py.
set -u
cd "$(dirname "$0")/.." || exit 2
usage() { sed -n '2p' "$0"; exit 2; }
print=0 gpus=4 data=data/stdlib out=out/four_gpus failed=
while [ $# -gt 0 ]; do
    case $1 in
        --print) print=1; shift ;;
        --gpus|--data|--out) [ $# -gt 1 ] || usage; printf -v "${1#--}" %s "$2"; shift 2 ;;
        *) usage ;;
    esac
done
case $gpus in 2|4) ;; *) echo "--gpus $gpus is not 2 or 4"; exit 2 ;; esac
if [ $print = 0 ]; then
    [ -f "$data/meta.json" ] || { echo "$data holds no data; python prepare.py stdlib --vocab-size 32768 --with-tests"
                                  exit 2; }
    mkdir -p "$out" || exit 2
fi

# row SECONDS NAME COMMAND...: one command with a limit, its output in DIR/NAME.log and its last lines here
row() {
    local limit=$1 name=$2
    shift 2
    if [ $print = 1 ]; then printf '%s:' "$name"; printf ' %q' "$@"; echo; return; fi
    echo "== $name: $*"
    timeout -k 10 "$limit" "$@" >"$out/$name.log" 2>&1 || { echo "   failed ($?): $out/$name.log"; failed+=" $name"; }
    tail -n 12 "$out/$name.log"
}
ranks() { echo "torchrun --standalone --nproc-per-node $1"; }
speed() { echo "bench/speed.py --json $out/speed.jsonl"; }

# ------------------------------------------------------------------------------
# Layouts are right: equal to one process, replicas equal to the bit, a graph equal to none
row 900 matrix $(ranks "$gpus") bench/gpu_matrix.py
row 600 matrix-portable $(ranks "$gpus") bench/gpu_matrix.py graph sync --portable
row 300 two-nodes bench/two_nodes.sh --per-node $((gpus / 2)) --data "$data"

# Speed: dense models with ZeRO-1, then experts on text, young and settled routing
row 600 dense $(ranks "$gpus") $(speed) W1 G2 G2-32 WP W3 W3-8192 BERT
row 400 experts $(ranks "$gpus") $(speed) W2b W2a --flags "--ep $gpus --zero 1 --data $data"
row 400 experts-portable $(ranks "$gpus") $(speed) W2b --portable --flags "--ep $gpus --zero 1 --data $data"
# Each process sees one GPU: $0 is python, and MPI says which of the node's processes it is
one_gpu='export CUDA_VISIBLE_DEVICES=${OMPI_COMM_WORLD_LOCAL_RANK:-${MPI_LOCALRANKID:-$PMI_RANK}}; exec "$0" "$@"'
row 400 experts-mpi mpiexec -n "$gpus" bash -c "$one_gpu" python $(speed) W2b --flags "--ep $gpus --zero 1 --data $data"
row 300 zero3 $(ranks "$gpus") $(speed) 7B --flags "--zero 3 --micro-batch 4"
row 400 long $(ranks "$gpus") $(speed) W1 --steps 10 \
    --flags "--cp $gpus --seq-len $((32768 * gpus)) --micro-batch 1 --recompute full"
for n in 1 2; do
    row 300 scaling-$n $(ranks $n) $(speed) W1 G2
done
row 300 ladder $(ranks "$gpus") bench/ladder.py

# A run of experts at full size that stops and goes on, bit for bit
experts="moe-4b --ep $gpus --zero 1 --data $data --deterministic --eval-every 0 --no-plot"
row 300 whole $(ranks "$gpus") train.py $experts --steps 20 --save-every 20 --out "$out/whole"
row 300 half $(ranks "$gpus") train.py $experts --steps 10 --save-every 10 --out "$out/resumed"
row 300 resumed $(ranks "$gpus") train.py $experts --steps 20 --save-every 20 --out "$out/resumed" --resume auto
row 120 equal python checkpoint.py diff "$out/whole" "$out/resumed"

if [ -n "$failed" ]; then echo "failed:$failed"; exit 1; fi
[ $print = 1 ] || echo "all rows ran: $out"
