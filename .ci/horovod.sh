#!/usr/bin/env bash
# Build Horovod for this venv's torch and MPI: the optional part of lesson 10.
#
#   make horovod                                 # about five minutes; the wheel is kept, and the next time it is only installed
#   HOROVOD_GPU_OPERATIONS=NCCL make horovod     # where there are GPUs, with nvcc and NCCL at hand
#
# 0.28.1 is Horovod's last release. It asks its compiler for C++14, and the headers of today's torch need C++17: a wrapper
# around the compiler puts that right, and makes it look for MPI and torch beside itself, in whatever venv it will be.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
version=0.28.1

key=$("$python" - <<'PY'
import platform, re, sys
import mpi4py
mpi4py.rc.initialize = False
from importlib.metadata import version
from mpi4py import MPI
mpi = re.sub(r"[^\w.]+", "", MPI.Get_library_version().replace("Version", "").split("\n")[0])[:30]
print(f"{platform.machine()}-py{sys.version_info[0]}{sys.version_info[1]}-torch{version('torch')}-{mpi}")
PY
)
kept=${XDG_CACHE_HOME:-$HOME/.cache}/course/horovod-$version-$key-${HOROVOD_GPU_OPERATIONS:-cpu}

if ! compgen -G "$kept/*.whl" >/dev/null; then
    for tool in g++ cmake; do
        command -v "$tool" >/dev/null || {
            echo "error: building Horovod needs $tool: apt-get install $tool, or load your site's module" >&2
            exit 2
        }
    done
    echo "building Horovod $version for $key (about five minutes)"
    build=$(mktemp -d)
    trap 'rm -rf "$build"' EXIT
    cat >"$build/c++17" <<WRAPPER
#!/usr/bin/env bash
for word; do
    word=\${word/-std=*++1[14]/-std=c++17}
    [[ \$word != -Wl,-rpath,* ]] || word=\${word//${PWD//\//\\/}\/.venv\/lib/'\$ORIGIN/../../../..'} # any venv's own libraries
    words+=("\$word")
done
exec $(command -v "${CXX:-g++}") "\${words[@]}" -g0
WRAPPER
    chmod +x "$build/c++17"
    if ! PATH="$PWD/.venv/bin:$PATH" CXX=$build/c++17 MAKEFLAGS=-j$(nproc) CMAKE_POLICY_VERSION_MINIMUM=3.5 \
        HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
        "$python" -m pip wheel -q --disable-pip-version-check --no-cache-dir --no-build-isolation --no-deps -w "$build/wheel" \
        "horovod==$version" >"$build/log" 2>&1; then
        tail -n 40 "$build/log" >&2
        exit 1
    fi
    mkdir -p "$(dirname "$kept")"
    mv -T "$build/wheel" "$kept" 2>/dev/null || compgen -G "$kept/*.whl" >/dev/null # somebody else was faster
fi
.venv/bin/uv pip install -q --python "$python" --no-deps "$kept"/*.whl
"$python" -c "import horovod.torch"
