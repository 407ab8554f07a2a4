#!/usr/bin/env bash
# Collects the wheels that run.sh needs on a machine with a GPU and no network (Python 3.12, x86-64).
# usage: collect_wheels.sh [--python PYTHON] [DIR]     (default: python3.12, and wheels, which git ignores)
#
# PYTHON is a Python 3.12 with exactly the torch of the GPU's machine. PYTHON builds the wheel of teraio, and
# the binaries that teraio compiles for a torch. An environment with only torch 2.11 already has networkx and
# numpy. Such an environment lacks the solver and the solver's imports. With these wheels the machine needs
# neither a compiler nor a network.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=python3.12
if [ "${1:-}" = --python ]; then
  python=$2
  shift 2
fi
target=${1:-$root/wheels}
limit_mib=58 # wheels and tree together must stay below 64 MiB

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

# Train for a moment with the wheels alone, and keep the binaries that teraio compiles for this torch.
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
