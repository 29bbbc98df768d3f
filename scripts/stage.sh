#!/bin/bash
# stage.sh FOLDER...: copy folders (.venv, data/mine) to the disk of every node of this allocation, and check
# each copy. The shared disk is read once per node, one large file after another; without it every rank opens
# some thousand small files there. docs/cluster.md says from which size on it pays.
#
#   scripts/stage.sh .venv data/mine            inside an allocation (qsub -I, salloc), or on one machine
#   source FOLDER/.venv/bin/activate; scripts/here.sh tiny --data FOLDER/data/mine    as it prints
#   qsub -v STAGE=data/mine,ARGS="tiny --data {disk}/data/mine" scripts/generic.pbs      environment and data
#   DISK=/local/scratch scripts/stage.sh .venv                                   another disk than /tmp
#   scripts/stage.sh --remove                                                    from every node
#
# A copy that a former job left is taken if its sum is the same. Exercised: on two nodes of a real OpenPBS,
# with mpiexec, and of a real Slurm, with sbcast (docs/cluster.md); here and in the suite on one
# (tests/test_stage.py). Never on a shared disk of a site.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
source scripts/common.sh

# On each node: stage.sh --unpack ARCHIVE SUM:FILES KILOBYTES DISK [delete]
unpack() {
    local archive=$1 sum=$2 size=$3 disk=$4 free got part=$4.part.$$
    local delete=$5 name=${SLURMD_NODENAME:-$(hostname)}
    here() { [ -z "$delete" ] || rm -f "$archive"; die "$name: $*"; }
    if [ "$(cat "$disk/.sum" 2>/dev/null)" = "$sum" ] && [ -O "$disk" ]; then
        [ -z "$delete" ] || rm -f "$archive"
        echo "$name: has it" && return
    fi
    [ ! -e "$disk" ] || { [ -O "$disk" ] && [ ! -L "$disk" ]; } || here "$disk belongs to somebody else"
    [ -w "${disk%/*}" ] || here "no folder ${disk%/*} to write to (DISK=FOLDER names another)"
    free=$(df -Pk "${disk%/*}" | awk 'NR == 2 { print $4 }')
    [ "$free" -gt $((size + size / 20)) ] || here "$((free / 1024)) MB free for $((size / 1024)) MB of $disk"
    mkdir -m 700 "$part" || here "no folder $part"  # a name that somebody else made first is not used
    # one pass: the sum is that of what tar reads
    got=$(tee >(tar -xf - -C "$part" 2> "$part/.said" || touch "$part/.failed"; touch "$part/.done") \
        < "$archive" | sha256sum | cut -c1-64)
    until [ -e "$part/.done" ]; do sleep 0.05; done
    got+=:$(($(find "$part" ! -type d | wc -l) - 2))
    if [ -e "$part/.failed" ] || [ "$got" != "$sum" ]; then
        got="not copied to $disk (${got#*:} of ${sum#*:} files) $(tail -n 1 "$part/.said")"
        rm -rf "$part"
        here "$got"
    fi
    # an environment names its own folder: in its programs' first lines and in activate
    find "$part" -path '*/bin/activate' | while read -r activate; do
        old=$(sed -n "s/^ *\(export \)\?VIRTUAL_ENV=[\"']\?\([^\"']*\)[\"']\?$/\2/p" "$activate" | tail -n 1)
        new=$disk${activate#"$part"}
        [ -n "$old" ] && grep -rIlF "$old" "$(dirname "$activate")" | xargs -r -d '\n' \
            sed -i "s|$old|${new%/bin/activate}|g"
    done
    rm -f "$part"/.{said,done}
    echo "$sum" > "$part/.sum"
    rm -rf "$disk"
    mv -T "$part" "$disk" || here "$disk cannot be written"
    [ -z "$delete" ] || rm -f "$archive"
    echo "$name: copied"
}

disk=$(stage_folder)
case $1 in
    --unpack) shift; unpack "$@"; exit ;;
    --remove) STAGE= RANKS=1 RUN="rm -rf" exec scripts/here.sh "$disk" ;;
    '' | -*) die "stage.sh FOLDER...: which folders? such as .venv data/mine" ;;
esac
began=$SECONDS
for folder; do
    [ -d "$folder" ] || die "no folder '$folder' in $PWD"
    case /$folder/ in //* | */../*) die "'$folder': a folder below $PWD, by its relative name" ;; esac
done
# the archive lies where all nodes read it, beside the repository's other results
archive=$(mktemp -p . .stage.XXXXXX) && trap 'rm -f "$archive"' EXIT || exit 1
tar --sort=name -cf "$archive" -- "$@" || die "no archive of $* in $PWD: is the disk full?"
sum=$(sha256sum < "$archive" | cut -c1-64):$(tar -tf "$archive" | grep -vc '/$')
size=$(($(stat -c %s "$archive") / 1024))
# Slurm sends the file from node to node, as a tree; with MPI every node reads it
from=("$PWD/${archive#./}" "$sum" $size "$disk")
if [ -n "$SLURM_JOB_ID" ] && command -v sbcast > /dev/null; then
    from[0]=${DISK:-/tmp}/nanoshard${archive#./}
    from+=(delete)
    if ! sbcast -f "$archive" "${from[0]}"; then
        STAGE= RANKS=1 RUN="rm -f" scripts/here.sh "${from[0]}" > /dev/null
        die "sbcast failed: have all nodes $((size / 1024)) MB free in ${DISK:-/tmp}?"
    fi
fi
# WAIT=0: a node that has the copy ends at once, and srun must not end the others
STAGE= WAIT=0 RANKS=1 RUN="scripts/stage.sh --unpack" scripts/here.sh "${from[@]}" || exit
echo "staged in $((SECONDS - began)) s: $((size / 1024)) MB, ${sum#*:} files on each node, sums equal"
for folder; do
    echo "  $folder is $disk/$folder"
    base=$(readlink -f "$folder/bin/python") && [[ $base != /usr/* ]] &&
        echo "  its Python itself stays in ${base%/bin/*}"
done
exit 0
