"""The smoke test: the first minute on a card.

The script checks (1) the device, (2) pinned memory, (3) a round trip of a tensor through host memory, (4) a
round trip of a tensor through the SSD. The script also records the output of `teraio doctor`. When a part
ends, the script writes its result to the file RESULT. `ok` is true if the essential parts worked.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import json
import os
import platform
import subprocess
import time
import traceback
from collections.abc import Callable
from typing import Any

import beginning

Figures = dict[str, Any]
MIB = 2**20
TENSOR = (16 if beginning.REHEARSAL else 64) * MIB
PINNED = (64 if beginning.REHEARSAL else 256) * MIB
DOCTOR_S = "0.5"  # seconds for each of eight measurements


def machine() -> Figures:
    """Return versions and facts of the card. `teraio._native` must be there; the solver ortools may be
    missing.
    """
    importlib.import_module("teraio._native")
    torch = importlib.import_module("torch")
    about = torch.cuda.get_device_properties(0)
    return {
        "card": about.name,
        "card_bytes": about.total_memory,
        "card_free_bytes": torch.cuda.mem_get_info()[0],
        "capability": list(torch.cuda.get_device_capability()),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        **{name: version(name) for name in ("teraio", "triton", "ortools", "numpy", "pandas", "protobuf")},
        "solver": loaded("ortools.sat.python.cp_model"),
        "backend": "teraio" in torch.compiler.list_backends(),
        "max_memory_allocated_us": microseconds(torch.cuda.max_memory_allocated),
        "event_us": microseconds(lambda: torch.cuda.Event(enable_timing=True).record()),
    }


def microseconds(call: Callable[[], Any], times: int = 200) -> float:
    call()
    begun = time.perf_counter()
    for _ in range(times):
        call()
    return round((time.perf_counter() - begun) / times * 1e6, 1)


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def loaded(module: str) -> str:
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001  whatever it is, the planner does without
        return f"{type(error).__name__}: {error}"[:300]
    return "loaded"


def pinned() -> Figures:
    cuda = importlib.import_module("teraio.runtime.device.cuda")
    begun = time.monotonic()
    slabs = cuda.CudaDevice().slabs(PINNED // 4, 4)
    return {"bytes": slabs.arena_bytes, "pin_seconds": round(time.monotonic() - begun, 4)}


def host_trip() -> Figures:
    """Evict one tensor to pinned memory, allocate other memory in its place, and fetch the tensor."""
    cuda = importlib.import_module("teraio.runtime.device.cuda")
    device = cuda.CudaDevice()
    tier = device.host(4 * TENSOR)
    place = tier.reserve(TENSOR)
    if place is None:
        raise RuntimeError(f"no place in host memory: {tier.refused}")
    return trip(device, tier.write(place), lambda: tier.read(place))


def ssd_trip() -> Figures:
    """Evict one tensor to a file, and fetch it."""
    cuda = importlib.import_module("teraio.runtime.device.cuda")
    store = importlib.import_module("teraio.runtime.store.store").Store
    device = cuda.CudaDevice()
    opened = store.open(None, None, device=device)
    extent = opened.reserve(TENSOR, "smoke")
    found = trip(
        device,
        lambda s, mark: opened.write(extent, s.data_ptr(), "smoke", event=mark.handle),
        lambda: lambda s, mark: opened.read(extent, s.data_ptr(), "smoke", event=mark.handle),
    )
    found |= {"directories": [str(path) for path in opened.directories], "direct": opened.direct}
    found["fallbacks"] = list(opened.fallbacks)
    opened.release(extent)
    opened.close()
    return found


def trip(device: Any, write: Any, read: Callable[[], Any]) -> Figures:
    torch = importlib.import_module("torch")
    tensor = torch.randint(0, 256, (TENSOR,), dtype=torch.uint8, device="cuda")
    before, storage = tensor.cpu(), tensor.untyped_storage()
    begun = time.monotonic()
    device.end_copy_and_free(device.begin_copy_out(storage, write))
    evicted_s = time.monotonic()
    empty, other = storage.nbytes() == 0, torch.full((TENSOR,), 7, dtype=torch.uint8, device="cuda")
    back = time.monotonic()
    device.end_copy_in(device.begin_copy_in(storage, TENSOR, read()))
    torch.cuda.synchronize()
    fetched_s = time.monotonic()
    if not empty or not torch.equal(tensor.cpu(), before):
        raise RuntimeError(f"emptied: {empty}; the fetched bytes differ")
    del other
    return {
        "bytes": TENSOR,
        "evict_seconds": round(evicted_s - begun, 4),
        "fetch_seconds": round(fetched_s - back, 4),
    }


def doctor() -> Figures:
    """Run `teraio doctor` as a user does, and return its report. A warning in the report is no failure."""
    cli = importlib.import_module("teraio.cli.main")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        try:
            code = cli.main(["doctor", "--json", "--seconds", DOCTOR_S])
        except SystemExit as end:
            code = end.code
    report: Figures = json.loads(output.getvalue())
    if code not in (0, 1):
        raise RuntimeError(f"exit code {code}: {output.getvalue()[-3000:]}")
    return report


def versions() -> Figures:
    """Return the `_foreach_` operators that do not raise the version counter of a tensor that they write.

    The engine detects writes of user code by the version counter. For these operators, torch raises the
    counter in separate code on a GPU. The function leaves out operators in `UNVERSIONED`, which are known
    exceptions.
    """
    torch = importlib.import_module("torch")
    unversioned = importlib.import_module("teraio.runtime.eager.user_code").UNVERSIONED
    number = torch.tensor(0.5, device="cuda")
    calls: dict[str, Callable[[Any], Any]] = {
        "_foreach_mul_": lambda x: torch._foreach_mul_([x], number),
        "_foreach_mul_ by a number": lambda x: torch._foreach_mul_([x], 0.5),
        "_foreach_mul_ by a list": lambda x: torch._foreach_mul_([x], [number.expand(64)]),
        "_foreach_add_": lambda x: torch._foreach_add_([x], 1.0),
        "_foreach_div_": lambda x: torch._foreach_div_([x], number),
        "_foreach_clamp_max_": lambda x: torch._foreach_clamp_max_([x], 1.0),
        "_foreach_copy_": lambda x: torch._foreach_copy_([x], [torch.ones(64, device="cuda")]),
        "_foreach_lerp_": lambda x: torch._foreach_lerp_([x], [torch.ones(64, device="cuda")], 0.5),
        "_foreach_sqrt_": lambda x: torch._foreach_sqrt_([x]),
        "_foreach_zero_": lambda x: torch._foreach_zero_([x]),
    }
    unmoved = []
    for name, call in calls.items():
        tensor = torch.ones(64, device="cuda")
        before = tensor._version
        call(tensor)
        if tensor._version == before and name.split()[0] not in unversioned:
            unmoved.append(name)
    return {"tried": len(calls), "unmoved": unmoved}


def free_space() -> Figures:
    done = subprocess.run(["df", "-Pm", "/tmp", "."], capture_output=True, text=True, timeout=10, check=False)
    return {"df": done.stdout.splitlines()[1:]}


TELLING = (free_space, versions)  # parts that only inform; the smoke test may pass although they fail


def main() -> int:
    found: Figures = {}
    ok = True
    beginning.stand_in()
    for part in (machine, free_space, versions, pinned, host_trip, ssd_trip, doctor):
        begun = time.monotonic()
        try:
            entry = part()
        except Exception:  # noqa: BLE001  every error is a result of the smoke test
            entry = {"error": traceback.format_exc()[-3000:]}
            ok = ok and part in TELLING
        found[part.__name__] = {**entry, "seconds": round(time.monotonic() - begun, 2)}
        print(part.__name__, json.dumps(found[part.__name__])[:2000], flush=True)
        beginning.write({**found, "at": part.__name__})
        if part is machine and not ok:
            break
    beginning.write({**found, "ok": ok, "ended": True})
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
