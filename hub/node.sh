# Sourced in a node's own view of the file system, before slurmd: learners reach the Python, the venv and the data, wherever they
# are, but nothing else in a folder that is closed to them, and of the repository neither solutions nor hidden tests.
# shellcheck shell=sh
set -eu # a node that would show too much does not start
closed() { # PATH: the topmost folder above it that others can't enter, if there is one
    path=$1 found=
    while path=$(dirname "$path") && [ "$path" != / ]; do
        case $(stat -c %A "$path") in *[xt]) ;; *) found=$path ;; esac
    done
    echo "$found"
}
show_only() { # FOLDER PATH...: an empty folder in place of FOLDER, with these paths of it
    folder=$1 && shift
    stage=$(mktemp -d) number=0
    for path; do
        number=$((number + 1))
        mkdir "$stage/$number"
        mount --bind "$path" "$stage/$number"
    done
    mount -t tmpfs -o mode=755,size=1m tmpfs "$folder"
    number=0
    for path; do
        number=$((number + 1))
        mkdir -p "$path"
        mount --bind "$stage/$number" "$path"
        umount "$stage/$number"
    done
    rm -r "$stage"
}
home=$(closed "$COURSE_ROOT") python=$(closed "$COURSE_PYTHON")
home=${home:-$COURSE_ROOT}
if [ "$python" = "$home" ]; then
    show_only "$home" "$COURSE_ROOT/.venv" "$COURSE_ROOT/data" "$COURSE_PYTHON"
else
    show_only "$home" "$COURSE_ROOT/.venv" "$COURSE_ROOT/data"
    [ -z "$python" ] || show_only "$python" "$COURSE_PYTHON"
fi
