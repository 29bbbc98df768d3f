#!/usr/bin/env bash
# Two nodes on one machine: bench/two_nodes.sh [--cpu] [--per-node N] [--layers N] [--steps N] [--out DIR]
#                           [--data DIR] [--flags "flags of train.py for W1 and W2b"] [--timeout SECONDS]
#                           [--parts "layouts shard files kill workloads shard-speed"]
#
# Each process has a host name of its own (unshare -u) and one GPU, or none with --cpu; NCCL believes that it is
# on another machine and uses sockets. One line per check; exit code 1 if any failed. The parts, by default all:
#     layouts      dp, pp, tp and ep between the nodes give the losses of one process, in fp64
#     shard        ZeRO within each node (--shard) does, too, and what then still leaves a node
#     files        a checkpoint that both nodes wrote, read by two nodes and by one
#     kill         a node is killed, and the run is resumed
#     workloads    a few layers of W1 and W2b in bf16
#     shard-speed  the same of W1 under ZeRO-1 and 3, over all ranks and within each node: losses, bytes and ms
# It shows that several nodes are right, not how fast they are: sockets on the loopback are no network.
set -u
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3} cpu=0 per_node=1 layers=4 steps=20 out= data=synthetic flags=--no-compile timeout=30
parts="layouts shard files kill workloads shard-speed"
while [ $# -gt 0 ]; do
    case $1 in
        --cpu) cpu=1; shift; continue ;;
        --per-node|--layers|--steps|--out|--data|--flags|--timeout|--parts) [ $# -gt 1 ] || { echo "$1 needs a value"; exit 2; } ;;
        *) sed -n '2,4p' "$0"; exit 2 ;;
    esac
    name=${1#--}; printf -v "${name//-/_}" %s "$2"; shift 2
done
size=$((2 * per_node)) failed=0
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())') || exit 2
[ "$gpus" -ge "$size" ] || cpu=1
if unshare -u true 2>/dev/null; then unshare=(unshare -u)
elif unshare -ru true 2>/dev/null; then unshare=(unshare -ru)
else echo "skipped: this machine lets neither root nor users have a host name of their own (unshare -u)"; exit 0; fi
if [ -z "$out" ]; then out=$(mktemp -d); trap 'rm -rf "$out"' EXIT; fi
mkdir -p "$out" || exit 2

# ------------------------------------------------------------------------------
# start(nodes, ranks per node, log, flags...): all ranks in the background, their ids in `pids`
start() {
    local nodes=$1 local_size=$2 log=$3 rank node settings port
    shift 3
    port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    pids=()
    for ((rank = 0; rank < nodes * local_size; rank++)); do
        node=$((rank / local_size))
        settings=(RANK=$rank WORLD_SIZE=$((nodes * local_size)) LOCAL_RANK=$((rank % local_size))
                  LOCAL_WORLD_SIZE=$local_size MASTER_ADDR=127.0.0.1 MASTER_PORT="$port" GLOO_SOCKET_IFNAME=lo
                  NCCL_SOCKET_IFNAME=lo)
        if [ $nodes -gt 1 ]; then
            settings+=(NCCL_HOSTID=node$node)
            [ "$local_size" -gt 1 ] || settings+=(NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1)
        fi
        if [ $cpu = 1 ]; then
            settings+=(CUDA_VISIBLE_DEVICES=-1 OMP_NUM_THREADS=1)
        else
            settings+=(CUDA_VISIBLE_DEVICES="$(seq -s, $((node * local_size)) $(((node + 1) * local_size - 1)))")
        fi
        "${unshare[@]}" sh -c 'hostname "$0"; exec "$@"' "node$node" env "${settings[@]}" "$python" train.py "$@" \
            --eval-every 0 --no-plot --timeout "$timeout" >"$log.$rank" 2>&1 &
        pids+=($!)
    done
}

# run(nodes, ranks per node, name, flags...): to the end, its files in $out/name -> 0 if all ranks did
run() {
    local nodes=$1 local_size=$2 name=$3 pid code=0
    shift 3
    start "$nodes" "$local_size" "$out/$name.log" "$@" --out "$out/$name"
    for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
    [ $code = 0 ] || { echo "--- $name ended with code $code:"; tail -n 5 "$out/$name.log".*; }
    return $code
}
two() { run 2 "$per_node" "$@"; }
one() { run 1 "$size" "$@"; }

say() {  # say(0 if right, what was tried, details)
    if [ "$1" = 0 ]; then echo "ok    $2: $3"; else echo "FAIL  $2: $3"; failed=1; fi
}

# same(what, tolerance, name, other): the losses of two runs, at the steps that both logged
same() {
    local text
    text=$("$python" - "$out/$3" "$out/$4" "$2" <<'PYTHON'
import json
import pathlib
import sys

a, b = ({row["step"]: row for row in map(json.loads, pathlib.Path(p, "metrics.jsonl").open())} for p in sys.argv[1:3])
steps = sorted(a.keys() & b.keys())
if not steps:
    sys.exit("no common step")
worst = max(abs(a[s]["loss"] / b[s]["loss"] - 1) for s in steps)
print(f"{len(steps)} losses up to step {steps[-1]}, {b[steps[0]]['loss']:.4f} to {b[steps[-1]]['loss']:.4f}, differ by "
      f"{worst:.1e} at most ({sys.argv[3]} allowed); {a[steps[-1]]['ms']:.1f} and {b[steps[-1]]['ms']:.1f} ms per step")
sys.exit(not worst <= float(sys.argv[3]))
PYTHON
    ) 2>&1
    say $? "$1" "${text:-a run left no losses}"
}

# leaves(name, other, zero): MB that rank 0 sends to other nodes in a step, as predicted and as counted; with
# --shard fewer, for more than one rank on a node
leaves() {
    local text
    text=$("$python" - "$out/$1" "$out/$2" "$per_node" <<'PYTHON'
import json
import pathlib
import sys

sent = []
for folder in sys.argv[1:3]:
    rows = [json.loads(line) for line in pathlib.Path(folder, "notes.jsonl").open()]
    sent.append(next(row["traffic"]["to other nodes"] for row in rows if "traffic" in row))
(all_ranks, _), (within, _) = sent
print("MB that leave a node per step and rank, predicted / counted: "
      + ", with --shard ".join(f"{a / 1e6:.3g} / {b / 1e6:.3g}" for a, b in sent))
right = all(abs(a - b) <= 1e-6 * b for a, b in sent)
sys.exit(not (right and (within < all_ranks or sys.argv[3] == "1")))
PYTHON
    ) 2>&1
    say $? "bytes of ZeRO-$3" "${text:-a run left no notes}"
}

# ------------------------------------------------------------------------------
began=$SECONDS
kind=GPU; [ $cpu = 0 ] || kind=CPU
echo "two nodes of $per_node $kind rank(s), files in $out"

tiny="--data synthetic --vocab-size 512 --n-layer 4 --n-embd 64 --ffn-hidden 96 --seq-len 64 --micro-batch 2
      --global-batch $((4 * size)) --dtype fp64 --log-every 1 --warmup 4 --decay-steps 12 --steps 8 --save-every 4"
wants() { [[ " $parts " == *" $1 "* ]]; }
# shellcheck disable=SC2086
{
    if wants layouts || wants files; then
        run 1 1 experts $tiny --n-experts 8 --top-k 2
        two ep $tiny --n-experts 8 --top-k 2 --ep $size --zero 1 && same "fp64, ep $size, ZeRO-1" 1e-10 ep experts
    fi
    if wants layouts; then
        run 1 1 dense $tiny
        two dense-2 $tiny --zero 1 && same "fp64, dp $size, ZeRO-1" 1e-10 dense-2 dense
        grep -qh "node 2/2 node1" "$out"/dense-2.log.*
        say $? "nodes" "$(grep -h '^\[node' "$out"/dense-2.log.* | cut -d, -f1 | paste -sd' ')"
        two pp $tiny --pp 2 && same "fp64, pp 2" 1e-10 pp dense
        two tp $tiny --tp $size && same "fp64, tp $size" 1e-10 tp dense
        for name in tp ep; do
            note=$(grep -h "^note: .* span nodes" "$out/$name.log.0")
            say $? "a warning for $name" "$note"
        done
    fi

    # ---------------- ZeRO within a node, replicas between nodes
    if wants shard; then
        wide="$tiny --global-batch $((16 * size))"
        run 1 1 wide $wide
        for zero in 1 2 3; do
            two all-$zero $wide --zero $zero && same "fp64, ZeRO-$zero over all ranks" 1e-10 all-$zero wide
            two shard-$zero $wide --zero $zero --shard "$per_node" \
                && same "fp64, ZeRO-$zero within a node" 1e-10 shard-$zero wide
            leaves all-$zero shard-$zero "$zero"
        done
        two home-shard $wide --zero 1 --resume "$out/shard-3/step_000004" \
            && same "all ranks read what groups wrote" 1e-10 home-shard wide
    fi

    if wants files; then
        from="--resume $out/ep/step_000004"
        two again $tiny --n-experts 8 --top-k 2 --ep $size --zero 1 $from \
            && same "two nodes read what two wrote" 1e-10 again experts
        run 1 1 home $tiny --n-experts 8 --top-k 2 $from \
            && same "one node reads what two wrote" 1e-10 home experts
    fi

    # ---------------- a node is killed
    if wants kill; then
        start 2 "$per_node" "$out/lost.log" $tiny --zero 1 --steps 100000 --out "$out/lost"
        for ((i = 0; i < 10 * timeout; i++)); do [ -d "$out/lost/step_000008" ] && break; sleep 0.1; done
        killed=$SECONDS
        for ((rank = per_node; rank < size; rank++)); do kill -9 "${pids[$rank]}"; done
        codes=(); for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null; codes+=($?); done
        took=$((SECONDS - killed))
        why=$(grep -h "^RuntimeError\|^torch.distributed.Dist\|no progress" "$out/lost.log.0" | head -n 1)
        [ "$took" -le $((2 * timeout)) ] && [ -n "$why" ] && { [ "${codes[0]}" = 1 ] || [ "${codes[0]}" = 43 ]; }
        say $? "node 2 is killed" \
            "codes ${codes[*]} after $took s of --timeout $timeout: ${why:-$(tail -n 1 "$out/lost.log.0")}"
        last=$(ls -d "$out"/lost/step_* | tail -n 1 | sed 's/.*step_0*//')
        two lost $tiny --zero 1 --steps $((last + 4)) --resume auto \
            && two whole $tiny --zero 1 --steps $((last + 4)) \
            && same "resumed at step $last after it" 1e-10 lost whole
    fi

    # ---------------- the workloads of bench/speed.py, a few layers of them
    w="--n-layer $layers --steps $steps --save-every 0 --log-every 5 --data $data"
    [ $cpu = 0 ] || w="$tiny --save-every 0 --dtype bf16"
    if wants workloads; then
        zero=$((1 - cpu))  # fp64 above has --zero 1
        two w1 dense-210m $w --zero $zero $flags && one w1-one dense-210m $w --zero $zero $flags \
            && same "W1 bf16, $layers layers, --zero $zero" 2e-3 w1 w1-one
        ep="--ep $size --zero 1"
        two w2b moe-4b $w $ep $flags && one w2b-one moe-4b $w $ep $flags \
            && same "W2b bf16, $layers layers" 5e-3 w2b w2b-one
        [ $cpu = 1 ] || { two w2b-exact moe-4b $w $ep --ep-slack 0 $flags \
            && same "W2b with messages of the exact size (--ep-slack 0)" 5e-3 w2b-exact w2b-one; }
    fi
    if wants shard-speed; then
        for zero in 1 3; do
            two w1-all-$zero dense-210m $w --zero $zero $flags
            two w1-shard-$zero dense-210m $w --zero $zero --shard "$per_node" $flags \
                && same "W1 bf16, ZeRO-$zero within a node and over all ranks" 2e-3 w1-shard-$zero w1-all-$zero
            leaves w1-all-$zero w1-shard-$zero "$zero, W1"
        done
    fi
}
echo "$((SECONDS - began)) s"
exit $failed
