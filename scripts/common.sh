# Every job script sources this file. What is wrong becomes one line, and exit code 2.
# Exercised: under a real PBS (docs/cluster.md), `make slurm`, and with stand-ins (tests/test_scripts.py).

die() { echo "nanoshard: $*" >&2; exit 2; }

# Where stage.sh puts its copies on each node: the same name in each job, so that a later one finds them
stage_folder() { echo "${DISK:-/tmp}/nanoshard-$(id -un)"; }

# Activate the environment VENV (.venv). `bash -l` has reset PATH: one that was active at submission is lost.
# VENV=none: the modules have all that is needed. STAGE="FOLDER...": copy the environment and these folders to
# the nodes' own disks first (stage.sh); STAGE=.venv copies the environment alone.
activate() {
    local venv=${VENV:-.venv}
    if [ "$venv" != none ]; then
        [ -r "$venv/bin/activate" ] || die "no environment in '$venv' (from $PWD): make it as" \
            "docs/cluster.md says, name another with VENV=FOLDER, or take the modules' Python with VENV=none"
        source "$venv/bin/activate"
    fi
    [ -n "$STAGE" ] || return
    local folders=($STAGE)
    [ "$venv" = none ] || [[ " $STAGE " == *" $venv "* ]] || folders+=("$venv")
    scripts/stage.sh "${folders[@]}" || exit
    [ "$venv" = none ] || source "$(stage_folder)/$venv/bin/activate"
}

# words_of TEXT: set the array `words` to the words of TEXT, read as in a shell: quotes, several lines. But
# nothing is expanded.
words_of() {
    xargs true <<< "$1" 2>/dev/null || die "a quote is not closed in the flags: $1"
    mapfile -d '' -t words < <(xargs printf '%s\0' <<< "$1")
}

# The lines of a file that hold flags
lines_of() { grep -vE '^[[:space:]]*(#|$)' "$1" || die "no flags in '$1'"; }

# sweep_flags FILE N: set the array `words` to the flags in line N of FILE, with an --out of its own
sweep_flags() {
    local file=$1 n=$2 lines name
    lines=$(lines_of "$file") || exit 2
    [ "$n" -ge 1 ] && [ "$n" -le "$(wc -l <<< "$lines")" ] || die "$file has no run $n"
    words_of "$(sed -n "${n}p" <<< "$lines")"
    name=$(basename "${file%.*}")
    [[ " ${words[*]}" == *" --out"[\ =]* ]] || words+=(--out "out/$name/$n")
}

# index_flags FLAG...: set the array `flags`, with the number of this job in its array in the place of {index}
# and the folder of stage.sh's copies in that of {disk}. SWEEP=FILE adds the line of FILE with that number.
index_flags() {
    local index=${INDEX:-${PBS_ARRAY_INDEX:-$SLURM_ARRAY_TASK_ID}} words=()
    if [ -n "$SWEEP" ]; then
        [ -n "$index" ] || die "SWEEP=$SWEEP: this is no job array"
        sweep_flags "$SWEEP" "$index"
    fi
    flags=("$@" "${words[@]}")
    case "${flags[*]}" in *"{index}"*) [ -n "$index" ] || die "{index} in '$*': this is no job array"; esac
    flags=("${flags[@]//\{index\}/$index}")
    flags=("${flags[@]//\{disk\}/$(stage_folder)}")
}
