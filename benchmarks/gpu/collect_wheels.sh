#!/usr/bin/env bash
# Collects what run.sh needs on a machine with a GPU and no network: wheels for Python 3.12 on x86-64.
# usage: collect_wheels.sh [--python PYTHON] [DIR]     (default: python3.12, and wheels, which git ignores)
#
# PYTHON is a Python 3.12 with exactly the torch of the GPU's machine. The wheel of teraio is built with it,
# and what teraio compiles for a torch. A bare environment of torch 2.11 has networkx, and numpy is there; it
# lacks the solver and what that imports. So the machine needs neither a compiler nor a network.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=python3.12
if [ "${1:-}" = --python ]; then
  python=$2
  shift 2
fi
target=${1:-$root/wheels}
limit_mib=58 # with the tree, less than 64

mkdir -p "$target/built"
target=$(cd "$target" && pwd)
rm -f "$target"/*.whl "$target/built"/*.so
"$python" -m pip download --quiet --only-binary=:all: --no-deps --dest "$target" \
  --python-version 3.12 --implementation cp \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
  --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
  --constraint "$root/constraints.txt" ortools absl-py immutabledict protobuf pandas python-dateutil

isolated=()
"$python" -c 'import nanobind, scikit_build_core' 2>/dev/null && isolated=(--no-build-isolation)
"$python" -m pip wheel --quiet --no-deps "${isolated[@]}" --wheel-dir "$target" \
  --config-settings "build-dir=$root/build/gpu-wheel" "$root"
# shellcheck disable=SC1091
(. "$root/benchmarks/gpu/made_from.sh" "$root") >"$target/made-from"

# A training of a moment, in the wheels alone: what is compiled for this torch is kept.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
for wheel in "$target"/*.whl; do "$python" -m zipfile -e "$wheel" "$scratch/site"; done
cd "$scratch"
export PYTHONSAFEPATH=1 PYTHONPATH="$scratch/site" XDG_CACHE_HOME="$scratch/cache" TERAIO_CACHE_DIR=off
"$python" - <<'PYTHON'
import ortools.sat.python.cp_model
import torch

import teraio

model = torch.nn.Linear(512, 512)
run = torch.compile(model, backend="teraio", options={"memory": "256MiB", "inner": "eager"})
run(torch.randn(8, 512)).sum().backward()
print("teraio", teraio.__file__, "with torch", torch.__version__)
PYTHON
find "$scratch/cache/teraio/built" -name '*.so' -exec cp {} "$target/built/" \;

size_mib=$(du -sm "$target" | cut -f1)
echo "$target: $(ls "$target"/*.whl | wc -l) wheels, $(ls "$target/built" | wc -l) built, $size_mib MiB"
if [ "$size_mib" -gt "$limit_mib" ]; then
  echo "more than $limit_mib MiB" >&2
  exit 1
fi
