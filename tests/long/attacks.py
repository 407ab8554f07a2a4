"""Attacks by other users of the machine, and by files from someone else: as root and as an ordinary user.

    python tests/long/attacks.py

Links, FIFOs, hard links, directories of others and exchanged ones at every point of making the store's file,
modes and umasks, plan caches that others may write, files made to mislead a reader. Those that need root to
be played are left out as an ordinary user, and counted. Prints `name value target PASS|FAIL`; exit code 0
or 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from says import as_it_is, exactly

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "runtime/store/test_directories.py",
    "runtime/store/test_store_kill.py",
    "formats/test_plan_cache.py",
    "formats/test_files_hostile.py",
    "formats/test_safetensors.py",
)
ORDINARY = 65534
# It may read what this checkout and its interpreter lie in, wherever that is; writing is what it may not.
AS_ORDINARY = [
    *("setpriv", f"--reuid={ORDINARY}", f"--regid={ORDINARY}", "--clear-groups"),
    *("--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search"),
    "--bounding-set=-all,+dac_read_search",
]


def played(who: str, before: list[str], uid: int) -> bool:
    with tempfile.TemporaryDirectory(prefix="attacks-", dir="/tmp") as name:
        folder = Path(name)
        os.chown(folder, uid, uid)
        told = folder / "told.xml"
        tests = [f"tests/{file}" for file in FILES]
        how = ["-o", "addopts=", "-q", "-p", "no:cacheprovider", f"--basetemp={folder}/tests"]
        command = [*before, sys.executable, "-m", "pytest", *how, f"--junit-xml={told}", *tests]
        environment = {**os.environ, "HOME": name, "TMPDIR": name, "XDG_CACHE_HOME": f"{name}/cache"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if not told.exists():
            print((done.stdout + done.stderr)[-2000:])
            return exactly(f"attacks-as-{who}-refused", 0, len(FILES))
        suite = next(ElementTree.parse(told).iter("testsuite"))
    count, failed, left_out = (
        sum(int(suite.attrib[name]) for name in names)
        for names in (("tests",), ("failures", "errors"), ("skipped",))
    )
    if failed:
        print(done.stdout[-3000:])
    right, tried = count - failed - left_out, count - left_out
    as_it_is(f"attacks-as-{who}-left-out", left_out)
    return exactly(f"attacks-as-{who}-refused", right, max(tried, 1))


def main() -> int:
    if os.geteuid():
        return 0 if played("an-ordinary-user", [], os.geteuid()) else 1
    good = [played("root", [], 0)]
    if shutil.which("setpriv"):
        good.append(played("an-ordinary-user", AS_ORDINARY, ORDINARY))
    else:
        print("left out  an ordinary user: there is no setpriv")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
