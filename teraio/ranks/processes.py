"""The processes of the ranks of one host. An ended process shows why a collective has failed."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ENDED_STATES = "ZXx"  # states of a process that has ended, but is still listed


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process of a rank. The moment of its start tells it from a later process with the same number.

    `space` names the space of process numbers. A container has its own.
    """

    pid: int
    started: str
    space: str

    @staticmethod
    def of_this_process() -> RankProcess | None:
        """Return this process, or None if the system does not describe it."""
        pid = os.getpid()
        with suppress(OSError):
            space = os.readlink("/proc/self/ns/pid")
            state, started = _state_and_start(pid)
            return RankProcess(pid, started, space) if state else None
        return None

    @staticmethod
    def parse(text: str | None) -> RankProcess | None:
        """Parse the text of a process. Return None for any other text."""
        parts = (text or "").split(" ")
        if len(parts) != 3 or not parts[0].isdecimal():
            return None
        return RankProcess(int(parts[0]), parts[1], parts[2])

    def __str__(self) -> str:
        return f"{self.pid} {self.started} {self.space}"

    def has_ended(self) -> bool:
        """Return whether this process has ended. Return False if this cannot be known."""
        with suppress(OSError):
            if os.readlink("/proc/self/ns/pid") != self.space:
                return False
            state, started = _state_and_start(self.pid)
            return not state or state in ENDED_STATES or started != self.started
        return False


def _state_and_start(pid: int) -> tuple[str, str]:
    """Return the state of a process and the moment of its start. Both are empty if there is no process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return "", ""
    fields = text.rpartition(")")[2].split()  # the second field, a name in parentheses, may have spaces
    return fields[0], fields[19]
