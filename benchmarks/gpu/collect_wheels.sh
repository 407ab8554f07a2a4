#!/usr/bin/env bash
# Downloads what run.sh installs on a machine with a GPU and no network: wheels for Python 3.12 on x86-64.
# usage: collect_wheels.sh [--deepspeed] [DIR]     (default: wheels, which git ignores)
#
# The machine has torch with CUDA, and with it numpy; it has cmake and a C++ compiler. What comes along: the
# build, networkx, the solver (its Python side imports pandas and protobuf), pytest, hypothesis: 47 MiB. With
# --deepspeed that as well, for part 4: what it runs it compiles there.
set -euo pipefail
cd "$(dirname "$0")/../.."
deepspeed=
if [ "${1:-}" = --deepspeed ]; then
  deepspeed=yes
  shift
fi
target=${1:-wheels}
limit_mib=60

collect() {
  pip download --quiet --only-binary=:all: --dest "$target" --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 "$@"
}

mkdir -p "$target"
collect --no-deps --constraint constraints.txt nanobind scikit-build-core packaging pathspec ninja \
  ortools absl-py immutabledict protobuf typing-extensions pandas python-dateutil six networkx \
  pytest pluggy iniconfig pygments hypothesis sortedcontainers

if [ -n "$deepspeed" ]; then
  DS_BUILD_OPS=0 pip wheel --quiet --no-deps --wheel-dir "$target" deepspeed==0.19.8
  collect einops hjson msgpack psutil py-cpuinfo pydantic tqdm
fi

size_mib=$(du -sm "$target" | cut -f1)
echo "$target: $(ls "$target" | wc -l) wheels, $size_mib MiB"
if [ "$size_mib" -gt "$limit_mib" ]; then
  echo "more than $limit_mib MiB" >&2
  exit 1
fi
