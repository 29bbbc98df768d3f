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
    STAGE=$(echo $([ "$venv" = none ] || echo "$venv") $STAGE | xargs -n 1 | sort -u)
    scripts/stage.sh $STAGE || die "not staged"
    [ "$venv" = none ] || source "$(stage_folder)/$venv/bin/activate"
}

# index_flags FLAG...: set the array `flags`, with the number of this job in its array in the place of {index}
# and the folder of stage.sh's copies in that of {disk}
index_flags() {
    local index=${INDEX:-${PBS_ARRAY_INDEX:-$SLURM_ARRAY_TASK_ID}}
    flags=("$@")
    case "$*" in *"{index}"*) [ -n "$index" ] || die "{index} in '$*': this is no job array"; esac
    flags=("${flags[@]//\{index\}/$index}")
    flags=("${flags[@]//\{disk\}/$(stage_folder)}")
}
