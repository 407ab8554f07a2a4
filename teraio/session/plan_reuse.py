"""Plans made before this run: the plan file, and plans of earlier runs in the plan cache.

In: measured steps. Out: an earlier plan for such a step, or the result of a plan's trial.

A plan fits a step if both have the same fingerprint, a hash of kernels in order, tensors, sizes and uses. The
first step of a run has the complete fingerprint already. Cached plans and new plans get a trial
(`course.py`): a step follows the plan. It must have the plan's fingerprint and must take as long as
predicted.
"""

from __future__ import annotations

import logging
import os
import platform

import torch

from teraio import __version__
from teraio.formats import plan_cache
from teraio.formats.plan import Plan
from teraio.formats.plan_cache import fingerprint_of_profile
from teraio.formats.schedule import Step
from teraio.options import Settings
from teraio.passes.slots import lifetimes
from teraio.ranks.rank_store import count_ranks, local_ranks
from teraio.runtime.engine.engine import Engine
from teraio.session.collective_waits import CollectiveWaits
from teraio.session.course import Order
from teraio.units import fmt_count, fmt_ns

log = logging.getLogger("teraio")

DRIFT_PERCENT = 15  # if a step's time differs more from its prediction, plan the step once more
# A plan for a smaller budget is valid. But if its budget is below 9/10 of the current budget, it leaves too
# much memory unused.
BUDGET_TENTHS = 9

# A plan depends on these options, on the budget and on the step.
PLAN_OPTIONS = ("planner", "keep", "host_memory", "optimizer_step", "recompute", "max_write_per_day")

# Part of the cache key of the latest plan that recomputes nodes. It stands in the place of a fingerprint.
LATEST = "the latest plan that makes something again"
LATE = "late updates of "  # part of the cache key of a decision about late updates


class EarlierPlans:
    """The plan file and the plan cache of one run."""

    def __init__(self, options: Settings, replay: Plan | None, engine: Engine, device: torch.device) -> None:
        self.options, self.replay, self.engine = options, replay, engine
        self.device = device
        self.collective_waits = CollectiveWaits(engine)
        folder = plan_cache.find_cache_folder()
        self.cache = plan_cache.PlanCache(folder) if folder and replay is None else None
        # Plans of this run for steps that have not run yet, by fingerprint.
        self.expected: dict[str, Plan] = {}
        self.followed: list[Order] = []  # orders of programs for which a plan was followed
        self.reported: set[Order] = set()  # orders whose difference from a followed order was logged
        self.warned: set[str] = set()

    @property
    def budget_bytes(self) -> int:
        """Return the current budget."""
        return self.engine.residency.budget_bytes

    def forget_all(self) -> None:
        """Stop using and saving plans, because `set_memory` has replaced the option `memory`.

        The cache keys of plans contain the old value of this option.
        """
        self.replay = self.cache = None

    def change_replay(self, plan: Plan | None) -> None:
        """Use this plan instead of the plan file, because the plan file has changed the step. None: the
        changed step gets a plan of its own."""
        self.replay = plan

    def expect_plan(self, plan: Plan) -> None:
        """Use this plan for the steps with its fingerprint, which have not run yet."""
        self.expected[plan.fingerprint] = plan

    def find_plan(self, order: Order, step: Step, fingerprint: str) -> Plan | None:
        """Return an earlier plan for this step, which has this fingerprint. Return None if there is none, or
        if the option `profile` requests a measurement.
        """
        if self.options.profile:
            return None
        plan = self.plan_file_for(fingerprint) or self.expected.pop(fingerprint, None)
        plan = plan or self._find_cached_plan(fingerprint)
        if plan is None:
            self._log_where_step_differs(order, step)
        else:
            self.followed.append(order)
        return plan

    def plan_file_for(self, fingerprint: str) -> Plan | None:
        """Return the plan of the plan file if it is for the step with this fingerprint, else None."""
        if self.replay is None or self.replay.fingerprint != fingerprint:
            return None
        log.info("teraio: replaying %s: %s", self.options.plan, fmt_count(len(self.replay.moves), "move"))
        return self.replay

    def _log_where_step_differs(self, order: Order, step: Step) -> None:
        """Log that a step begins like a step that followed a plan, and then differs. Log each order of
        programs once.

        Such a step moves tensors on demand.
        """
        alike = max((_common_prefix_length(order, other) for other in self.followed), default=0)
        if not alike or order in self.reported:
            return
        self.reported.add(order)
        kind = step.calls[alike].schedule.kind if alike < len(order) else "end"
        log.info(
            "teraio: a step differs from the planned step after %s, by another %s: it is measured and gets a "
            "plan of its own",
            fmt_count(alike, "call"),
            kind,
        )

    def _find_cached_plan(self, fingerprint: str) -> Plan | None:
        if self.cache is None:
            return None
        plan, refused = self.cache.read_plan(self._cache_key(fingerprint), fingerprint)
        if refused:
            self._warn_once("the plan of an earlier run is not used: %s", refused)
        if plan is None or not self._fits_budget(plan):
            return None
        log.info(
            "teraio: following the plan of an earlier run: %s, a step of %s predicted",
            fmt_count(len(plan.moves), "move"),
            fmt_ns(plan.predicted.step_ns),
        )
        return plan

    def _fits_budget(self, plan: Plan) -> bool:
        least_tenths = BUDGET_TENTHS * self.budget_bytes
        return plan.budget_bytes <= self.budget_bytes and least_tenths <= 10 * plan.budget_bytes

    def needs_trial(self, order: Order, plan: Plan) -> bool:
        """Return True if a new plan gets a trial before all steps follow it.

        A new plan needs a trial, because its kernel times may be too long. Measured steps move tensors on
        demand, and kernels run slower beside such transfers than beside planned transfers.

        Return False if the run has a plan file, or if the option `profile` is set. Also return False if the
        plan has no moves or no prediction, because then there is nothing to compare.
        """
        if self.options.profile or self.replay is not None or not (plan.moves and plan.predicted.step_ns):
            return False
        self.followed.append(order)
        return True

    def matches_prediction(self, plan: Plan, step: Step) -> bool:
        """Return True if a step that followed the plan matches it: it has the plan's fingerprint and took the
        predicted time. The time that it waited for other ranks does not count.
        """
        predicted_ns = plan.predicted.step_ns
        profile = lifetimes.profile_of_steps([step], "run")
        if fingerprint_of_profile(profile) != plan.fingerprint:
            log.info("teraio: this step is not the planned step: it is measured and planned again")
            self.engine.follow_plan(Plan("", "none", self.budget_bytes))
        elif self._has_drifted(
            took_ns := _measured_step_ns(step) - self.collective_waits.waited_for_ranks_ns(profile),
            predicted_ns,
        ):
            log.info(
                "teraio: a step took %s, the plan predicts %s: it is measured and planned again",
                fmt_ns(took_ns),
                fmt_ns(predicted_ns),
            )
        else:
            return True
        return False

    def _has_drifted(self, took_ns: int, predicted_ns: int) -> bool:
        """Return True if a step's duration differs too much from its prediction.

        With the option `max_write_per_day`, a faster step is no drift. While the day's limit is not used up,
        steps are faster than predicted.
        """
        if took_ns < predicted_ns and self.options.max_write_per_day:
            return False
        return abs(took_ns - predicted_ns) * 100 > DRIFT_PERCENT * predicted_ns

    def cached_plan_of_graph(self, graph: str) -> Plan | None:
        """Return a cached plan that recomputes nodes of this joint graph (forward and backward together)."""
        if self.cache is None:
            return None
        plan, _ = self.cache.read_plan(self._cache_key(graph), None)
        return plan if plan is not None and self._fits_budget(plan) else None

    def save_plan(self, plan: Plan) -> None:
        """Save a plan for later runs. If the write fails, the training continues.

        Save it under its fingerprint. If the plan recomputes nodes, save it also under each joint graph that
        contains them.
        """
        if plan.planner == "none":
            return
        graphs = dict.fromkeys(each.graph for each in plan.remade)
        for name in (plan.fingerprint, *graphs, *([LATEST] if graphs else [])):
            self._write_to_cache(name, plan, "the plan was not saved for later runs: %s")

    def _write_to_cache(self, name: str, plan: Plan, failure: str) -> None:
        if self.cache is not None and (refused := self.cache.write_plan(self._cache_key(name), plan)):
            self._warn_once(failure, refused)

    def late_updates_after(self, fingerprint: str) -> tuple[str, ...] | None:
        """Return the weights whose updates an earlier run of this training has run late, after a first step
        with this fingerprint. Return None if no run has decided this."""
        if self.cache is None:
            return None
        plan, _ = self.cache.read_plan(self._cache_key(LATE + fingerprint), fingerprint)
        return None if plan is None or not self._fits_budget(plan) else plan.late

    def save_late_updates(self, fingerprint: str, names: tuple[str, ...]) -> None:
        """Save for later runs that the updates of these weights run late after a step with this
        fingerprint."""
        decision = Plan(fingerprint, "none", self.budget_bytes, late=names)
        failure = "the choice of late updates was not saved for later runs: %s"
        self._write_to_cache(LATE + fingerprint, decision, failure)

    def _cache_key(self, fingerprint: str) -> str:
        """Return the plan's cache key.

        The key contains no bandwidths, because measured bandwidths differ a little in each run. If a
        difference matters, the plan fails its trial.
        """
        options = sorted((name, repr(getattr(self.options, name))) for name in PLAN_OPTIONS)
        memory = "" if self.options.memory is None else str(self.options.memory)
        kind = self.device.type
        name = torch.cuda.get_device_name(self.device) if kind == "cuda" else platform.machine()
        machine = f"{kind} {name} {os.cpu_count()}{_ranks_as_text()}"
        return plan_cache.cache_key_of(
            fingerprint, memory, repr(options), machine, __version__, torch.__version__
        )

    def _warn_once(self, text: str, why: str) -> None:
        if why not in self.warned:
            self.warned.add(why)
            log.warning(f"teraio: {text}", why)


def _ranks_as_text() -> str:
    """Return the number of ranks, and of ranks that share this host. Return "" for a training on one rank.

    A plan that was made on one rank expects all of the drives' bandwidth.
    """
    ranks, sharers = count_ranks(), local_ranks()
    return f" {ranks} ranks, {sharers} on this host" if max(ranks, sharers) > 1 else ""


def fingerprint_of_step(step: Step) -> str:
    """Return the fingerprint of a step. A plan for this step has the same fingerprint."""
    return fingerprint_of_profile(lifetimes.profile_of_steps([step], "run"))


def _common_prefix_length(one: Order, other: Order) -> int:
    """Return how many programs are the same from the start of both steps."""
    return next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _measured_step_ns(step: Step) -> int:
    """Return the duration of a step from its first slot to its end, waits included."""
    first = step.calls[0]
    return step.end_ns - (first.at_ns[0] - first.stall_ns[0])
