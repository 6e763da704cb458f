# Sourced by the scripts beside it: a virtual environment with this checkout installed in it.
#
# MIXSHARDS_VENV names the virtual environment to make or use (default: .venv in the repository).

repo=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=${MIXSHARDS_VENV:-$repo/.venv}
bold='' plain=''
[[ ! -t 1 ]] || { bold=$'\e[1m' plain=$'\e[0m'; }

heading() { printf '\n%s== %s%s\n\n' "$bold" "$*" "$plain"; }
say() { printf '%s\n' "$*"; }
show() { printf '%s$ %s%s\n' "$bold" "$*" "$plain"; }
run() { show "$(quoted "$@")" && "$@"; }
quoted() {
    local word line=''
    for word; do
        [[ $word != *[!a-zA-Z0-9_./=-]* ]] || word="'$word'"
        line+=" $word"
    done
    printf '%s' "${line# }"
}
fail() { printf 'error: %s\n' "$*" >&2 && exit 1; }

modern() { # PYTHON [MODULES]
    "$1" -c "import sys${2:+, $2}; sys.exit(sys.version_info < (3, 10))" 2>/dev/null
}

find_python() {
    local candidate
    for candidate in python3 python3.{14,13,12,11,10} python; do
        modern "$candidate" ensurepip,venv && say "$candidate" && return
    done
    fail 'found no Python 3.10 or newer with the venv module (on Debian: apt install python3-venv)'
}

installed_from() {
    (cd / && python -c 'import os, pipeline; print(os.path.dirname(pipeline.__file__))')
}

use_venv() { # EXTRA[,EXTRA..]; makes and activates the environment, and installs where needed
    local python wanted stamp start
    if [[ ! -x $venv/bin/python ]]; then
        python=$(find_python)
        run "$python" -m venv "$venv"
    fi
    modern "$venv/bin/python" || fail "$venv holds a Python older than 3.10; set MIXSHARDS_VENV"
    show "source $venv/bin/activate"
    venv=$(cd -- "$venv" && pwd -P)
    export VIRTUAL_ENV=$venv PATH=$venv/bin:$PATH
    hash -r
    wanted="$repo $(cat -- "$repo/setup.py" "$repo/constraints.txt" | cksum)"
    stamp=$venv/.mixshards-$1
    if [[ -f $stamp && $(<"$stamp") == "$wanted" && $(installed_from) -ef $repo/pipeline ]]; then
        say '(installed already)'
    else
        python -m pip --version >/dev/null 2>&1 || run python -m ensurepip
        start=$PWD
        run cd "$repo"
        run python -m pip install --quiet --disable-pip-version-check \
            --constraint constraints.txt --editable ".[$1]"
        cd -- "$start"
        say "$wanted" >"$stamp"
    fi
}

own_folder() { # FOLDER MARKER; refuses a folder that holds anything but an earlier run of the demo
    demo=$1 marker=.$2
    [[ $demo != -* ]] || fail "usage: $0 [FOLDER]"
    [[ ! -e $demo || -f $demo/$marker || (-d $demo && -z $(ls -A -- "$demo")) ]] ||
        fail "$demo is neither empty nor an earlier demo's; name another folder: $0 FOLDER"
}

enter_folder() { # goes into the folder that own_folder was given, without what was built there
    mkdir -p -- "$demo"
    run cd "$demo"
    say "Made by $(basename -- "$0") of mixshards, which replaces data/, mix.yaml, out/ and" \
        'runs/ here.' >"$marker"
    say '*' >.gitignore
    rm -rf out runs
}

kill_when() { # COMMAND.., run in the background, dies once the function `$1` says so; 0 if it did
    local enough=$1 status=0
    shift
    show "$(quoted "$@") &"
    set -m # its processes are a group of their own, and all of them die
    "$@" &
    set +m
    child=$!
    trap 'kill -KILL -- "-$child" 2>/dev/null || true' EXIT
    until "$enough"; do
        kill -0 "$child" 2>/dev/null || break
        sleep 0.02
    done
    kill -KILL -- "-$child" 2>/dev/null || true
    { wait "$child" || status=$?; } 2>/dev/null
    trap - EXIT
    case $status in
        0) say '(it had already finished, so there was nothing left to kill)' ;;
        137) show "kill -KILL -- -$child" ;;
        *) exit "$status" ;;
    esac
    [[ $status != 0 ]]
}
