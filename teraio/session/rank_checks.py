"""The checks of one rank against the other ranks of its training.

In: options, loaded programs. Out: an error that names the difference. In a training on one rank, nothing is
done.
"""

from __future__ import annotations

import logging
from dataclasses import fields

import torch

from teraio import __version__
from teraio.errors import UnsupportedError
from teraio.formats.schedule import Schedule
from teraio.options import Settings
from teraio.ranks.agreement import Agreement
from teraio.ranks.rank_store import RankStore
from teraio.session.recomputation import Recomputation

log = logging.getLogger("teraio")

# Options that change the steps of all ranks, besides the options that change compiled programs.
STEP_OPTIONS = ("optimizer_step", "updates")


class RankChecks:
    """The checks of a session. The constructor compares versions and options with the other ranks.

    A session may start before the process group. Then the first program with collectives compares them.
    """

    def __init__(self, options: Settings) -> None:
        self.options = options
        self.agreement: Agreement | None = None
        self._compare_options()

    def _compare_options(self) -> None:
        store = RankStore.of_process() if self.agreement is None else None
        if store is not None:
            self.agreement = Agreement(store, compared_options(self.options))
            self.agreement.check_options()

    def check_program(self, schedule: Schedule, recomputation: Recomputation) -> None:
        """Compare the collectives of a loaded program with other ranks, and turn recomputation off if it has
        collectives.

        Each rank would choose other activations to recompute, and would get another order of collectives.
        """
        if not schedule.collectives:
            return
        self._compare_options()
        if self.agreement is None:
            return
        if recomputation.wanted:
            what = (
                "option 'recompute' is 'auto', and a program has collectives: the ranks could choose "
                "different activations, and so get different orders of collectives. Nothing is recomputed"
            )
            if self.options.on_fallback == "error":
                raise UnsupportedError(f"{what} (on_fallback is 'error')")
            recomputation.turn_off()
            if self.agreement.store.rank == 0:
                log.warning("teraio: %s", what)
        self.agreement.check_collectives(schedule.kind, schedule.graph, schedule.collectives)


def compared_options(options: Settings) -> dict[str, str]:
    """Return the versions, and the options that must be the same on all ranks."""
    names = [f.name for f in fields(Settings) if f.metadata["program"] or f.name in STEP_OPTIONS]
    versions = {"teraio": __version__, "torch": torch.__version__}
    return versions | {name: repr(getattr(options, name)) for name in names}
