# The flags of train.py, as the job scripts get them. common.sh sources this file.
# Exercised: with a real PBS, with `make slurm`, and with stand-ins (tests/test_scripts.py, test_stage.py).

# words_of TEXT: set the array `words` to the words of TEXT, read as in a shell: quotes, several lines. But
# nothing is expanded.
words_of() {
    xargs true <<< "$1" 2>/dev/null || die "a quote is not closed in the flags: $1"
    mapfile -d '' -t words < <(xargs printf '%s\0' <<< "$1")
}

# The lines of a file that hold flags, also where an editor of Windows ended them
lines_of() {
    [ -f "$1" ] && [ -r "$1" ] || die "no file '$1' to read (from $PWD)"
    tr -d '\r' < "$1" | grep -vE '^[[:space:]]*(#|$)' || die "no flags in '$1'"
}

# sweep_flags FILE N: set the array `words` to the flags in line N of FILE, with an --out of its own
sweep_flags() {
    local file=$1 n=$2 lines name
    lines=$(lines_of "$file") || exit 2
    [ "$n" -ge 1 ] && [ "$n" -le "$(wc -l <<< "$lines")" ] || die "$file has no run $n"
    words_of "$(sed -n "${n}p" <<< "$lines")"
    name=$(basename "${file%.*}")
    [[ " ${words[*]}" == *" --out"[\ =]* ]] || words+=(--out "out/$name/$n")
}

# value_of NAME FLAG...: print the last value that the flags give to NAME, if they do
value_of() {
    local name=$1 value=''
    while shift && [ $# -gt 0 ]; do
        case $1 in
            "$name") value=$2 ;;
            "$name"=*) value=${1#*=} ;;
        esac
    done
    printf '%s' "$value"
}

# find_resume FLAG...: set `resume` to the checkpoint with which a run of these flags begins. A --resume PATH
# counts until --out has a checkpoint: a job that is queued again goes on with what it has saved.
find_resume() {
    local path out saved
    path=$(value_of --resume "$@")
    out=$(value_of --out "$@")
    resume=auto
    case $path in '' | auto | none) return ;; esac
    [ -n "$out" ] || die "--resume $path in a job needs --out, the folder with which the job goes on later"
    [[ $(realpath -m "$path") != "$(realpath -m "$out")"/* ]] || die "--resume $path lies in --out $out:" \
        "give another --out, because the next start of this job takes the newest checkpoint of --out"
    saved=("$out"/step_*[0-9]/index.json)
    [ -e "${saved[0]}" ] || { resume=$path; return; }
    echo "nanoshard: $out has checkpoints of its own, so the run goes on with them and not from $path"
}

# index_flags FLAG...: set `resume`, and the array `flags`, with the number of this job in its array in the
# place of {index} and the folder of stage.sh's copies in that of {disk}. SWEEP=FILE adds the line with that
# number.
index_flags() {
    local index=${INDEX:-${PBS_ARRAY_INDEX:-$SLURM_ARRAY_TASK_ID}} words=() preset=tiny
    if [ -n "$SWEEP" ]; then
        [ -n "$index" ] || die "SWEEP=$SWEEP: this is no job array"
        sweep_flags "$SWEEP" "$index"
    fi
    flags=("$@" "${words[@]}")
    case "${flags[*]}" in *"{index}"*) [ -n "$index" ] || die "{index} in '$*': this is no job array"; esac
    flags=("${flags[@]//\{index\}/$index}")
    flags=("${flags[@]//\{disk\}/$(stage_folder)}")
    if [ ! -O . ] && [[ " ${flags[*]}" != *" --out"[\ =]* ]]; then  # a shared clone
        [[ $flags == -* ]] || preset=$flags  # the first word
        flags+=(--out "out/$(id -un)/$preset")
    fi
    find_resume "${flags[@]}"
}
