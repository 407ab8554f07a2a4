"""Attacks by other users of the machine and by hostile files, as root and as an ordinary user.

    python tests/long/attacks.py

The attacks on the store use (1) links, FIFOs, hard links and directories that other users made, and (2) modes
and umasks. In further attacks, (3) another user exchanges directories at every point at which the store makes
its file. Other attacks use (4) plan caches that other users may write to, and (5) files made to mislead a
reader.

Some attacks need root. If an ordinary user runs the script, the script counts these attacks as left out. The
script prints lines `name value target PASS|FAIL`, and exits with 1 if a line says FAIL.
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
# This command runs the tests as an ordinary user, who may read every file and write none. Reading is
# necessary, because the checkout and its interpreter may be in any folder.
AS_ORDINARY = [
    *("setpriv", f"--reuid={ORDINARY}", f"--regid={ORDINARY}", "--clear-groups"),
    *("--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search"),
    "--bounding-set=-all,+dac_read_search",
]


def played(who: str, before: list[str], uid: int) -> bool:
    with tempfile.TemporaryDirectory(prefix="attacks-", dir="/tmp") as name:
        folder = Path(name)
        os.chown(folder, uid, uid)
        report = folder / "told.xml"
        tests = [f"tests/{file}" for file in FILES]
        how = ["-o", "addopts=", "-q", "-p", "no:cacheprovider", f"--basetemp={folder}/tests"]
        command = [*before, sys.executable, "-m", "pytest", *how, f"--junit-xml={report}", *tests]
        environment = {**os.environ, "HOME": name, "TMPDIR": name, "XDG_CACHE_HOME": f"{name}/cache"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if not report.exists():
            print((done.stdout + done.stderr)[-2000:])
            return exactly(f"attacks-as-{who}-refused", 0, len(FILES))
        suite = next(ElementTree.parse(report).iter("testsuite"))
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
        print("left out  an ordinary user: setpriv is missing")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
