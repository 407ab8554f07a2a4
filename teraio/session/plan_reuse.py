"""Plans that are there before anything is measured: the plan file, and what earlier runs left in the cache.

    follow      the last step is one that such a plan is for -> engine, from the next step on
    keep        a new plan, for later runs

A step is recognised by its fingerprint, which the first step shows already: kernels in order, tensors, sizes,
uses. A plan from the cache is on trial for two steps, and so is one that was just made. The first finds its
tensors where no plan left them; the second must be the same step still, and take as long as predicted, or it
is measured and planned again, once.
"""

from __future__ import annotations

import logging
import os
import platform
from dataclasses import dataclass

import torch

from teraio import __version__
from teraio.formats import plan_cache
from teraio.formats.plan import Plan
from teraio.formats.plan_cache import fingerprint_of_profile
from teraio.formats.schedule import Step
from teraio.options import Settings
from teraio.passes.slots import lifetimes
from teraio.runtime.engine.engine import Engine
from teraio.units import fmt_count, fmt_ns

log = logging.getLogger("teraio")

DRIFT_PERCENT = 15  # between predicted and measured: beyond it the step is measured and planned again, once
TRIAL_STEPS = 2
# A plan for a smaller budget is a plan, but one for less than 9/10 leaves memory unused.
BUDGET_TENTHS = 9

# What a plan depends on, beside the step and the budget.
PLAN_OPTIONS = ("planner", "keep", "host_memory", "optimizer_step", "recompute", "max_write_per_day")

LATEST = "the latest plan that makes something again"  # in place of a fingerprint

Order = tuple[str, ...]  # of programs


@dataclass(slots=True)
class _PlanTrial:
    plan: Plan
    steps: int = 0


class EarlierPlans:
    def __init__(self, options: Settings, replay: Plan | None, engine: Engine, device: torch.device) -> None:
        self.options, self.replay, self.engine = options, replay, engine
        self.device = device
        folder = plan_cache.find_cache_folder()
        self.cache = plan_cache.PlanCache(folder) if folder and replay is None else None
        self.trials: dict[Order, _PlanTrial] = {}
        self.judged: set[Order] = set()  # not looked up again
        self.followed: list[Order] = []
        self.left: set[Order] = set()  # orders that began like a followed one, and were said
        self.said: set[str] = set()

    @property
    def budget_bytes(self) -> int:
        return self.engine.residency.budget_bytes

    def forget_all(self) -> None:
        """Memory is no longer what the options say: plans that are made for it now are for this run alone."""
        self.judged |= self.trials.keys()
        self.trials.clear()
        self.replay = self.cache = None

    def follow_if_known(self, order: Order, step: Step) -> bool:
        """Whether a plan is followed from now on, or still, that nobody had to make; then nothing is measured
        for one. Someone who asked for a profile gets it measured."""
        if self.options.profile or order in self.judged:
            return False
        trial = self.trials.get(order)
        if trial is None:
            begun = self._follow_plan_of_fingerprint(
                order, fingerprint_of_profile(lifetimes.profile_of_steps([step], "run"))
            )
            if begun:
                self.followed.append(order)
            else:
                self._log_where_step_differs(order, step)
            return begun
        trial.steps += 1
        if trial.steps < TRIAL_STEPS:
            return True
        del self.trials[order]
        self.judged.add(order)
        if self._matches_prediction(trial.plan, step):
            self.engine.settle_plan(None)
            return True
        return False

    def _log_where_step_differs(self, order: Order, step: Step) -> None:
        """A step that began like one with a plan and went on differently: from there it ran on demand."""
        alike = max((_common_prefix_length(order, other) for other in self.followed), default=0)
        if not alike or order in self.left:
            return
        self.left.add(order)
        there = step.calls[alike].schedule.kind if alike < len(order) else "end"
        log.info(
            "teraio: a step left the plan after %s, where it has another %s: it is measured and planned by "
            "itself",
            fmt_count(alike, "call"),
            there,
        )

    def _follow_plan_of_fingerprint(self, order: Order, fingerprint: str) -> bool:
        if self.replay is not None and self.replay.fingerprint == fingerprint:
            log.info("teraio: replaying %s: %s", self.options.plan, fmt_count(len(self.replay.moves), "move"))
            self.engine.settle_plan(self.replay)
            return True
        plan = self._find_cached_plan(fingerprint)
        if plan is None:
            return False
        log.info(
            "teraio: following the plan of an earlier run: %s, a step of %s predicted",
            fmt_count(len(plan.moves), "move"),
            fmt_ns(plan.predicted.step_ns),
        )
        self.trials[order] = _PlanTrial(plan)
        self.engine.follow_plan(plan)
        return True

    def _find_cached_plan(self, fingerprint: str) -> Plan | None:
        if self.cache is None:
            return None
        plan, refused = self.cache.read_plan(self._cache_key(fingerprint), fingerprint)
        if refused:
            self._warn_once("the plan of an earlier run is not used: %s", refused)
        return plan if plan is not None and self._fits_budget(plan) else None

    def _fits_budget(self, plan: Plan) -> bool:
        least_tenths = BUDGET_TENTHS * self.budget_bytes
        return plan.budget_bytes <= self.budget_bytes and least_tenths <= 10 * plan.budget_bytes

    def put_on_trial(self, order: Order, plan: Plan) -> bool:
        """Whether a plan that was just made is on trial, too: in warm-up steps tensors move on demand, and
        kernels beside such transfers take longer than beside planned ones. A plan file is not replaced."""
        if self.options.profile or self.replay is not None or order in self.judged:
            return False
        if not (plan.moves and plan.predicted.step_ns):
            return False
        self.trials[order] = _PlanTrial(plan)
        self.followed.append(order)
        return True

    def _matches_prediction(self, plan: Plan, step: Step) -> bool:
        """Whether this step, which followed the plan, is the one it was made for and took what it said."""
        took_ns, predicted_ns = _measured_step_ns(step), plan.predicted.step_ns
        if fingerprint_of_profile(lifetimes.profile_of_steps([step], "run")) != plan.fingerprint:
            log.info("teraio: the step is not the one that was planned: it is measured and planned again")
            self.engine.follow_plan(Plan("", "none", self.budget_bytes))
        elif self._has_drifted(took_ns, predicted_ns):
            log.info(
                "teraio: a step took %s, the plan says %s: it is measured and planned again",
                fmt_ns(took_ns),
                fmt_ns(predicted_ns),
            )
        else:
            return True
        return False

    def _has_drifted(self, took_ns: int, predicted_ns: int) -> bool:
        """Where writes are capped, a step may be faster than predicted for as long as there is some left."""
        if took_ns < predicted_ns and self.options.max_write_per_day:
            return False
        return abs(took_ns - predicted_ns) * 100 > DRIFT_PERCENT * predicted_ns

    def cached_plan_of_graph(self, graph: str) -> Plan | None:
        """The plan of an earlier run whose programs were cut from this joint graph."""
        if self.cache is None:
            return None
        plan, _ = self.cache.read_plan(self._cache_key(graph), None)
        return plan if plan is not None and self._fits_budget(plan) else None

    def save_plan(self, plan: Plan) -> None:
        """For later runs, by its step, and by the joint graphs that it was compiled from anew. A plan that
        cannot be written is no reason to end a training."""
        if self.cache is None or plan.planner == "none":
            return
        graphs = dict.fromkeys(each.graph for each in plan.remade)
        for name in (plan.fingerprint, *graphs, *([LATEST] if graphs else [])):
            refused = self.cache.write_plan(self._cache_key(name), plan)
            if refused:
                self._warn_once("the plan was not kept for later runs: %s", refused)

    def _cache_key(self, fingerprint: str) -> str:
        """Bandwidths are no part of it: they differ from run to run, and where that matters, steps drift."""
        asked = sorted((name, repr(getattr(self.options, name))) for name in PLAN_OPTIONS)
        memory = "" if self.options.memory is None else str(self.options.memory)
        kind = self.device.type
        name = torch.cuda.get_device_name(self.device) if kind == "cuda" else platform.machine()
        machine = f"{kind} {name} {os.cpu_count()}"
        return plan_cache.cache_key_of(
            fingerprint, memory, repr(asked), machine, __version__, torch.__version__
        )

    def _warn_once(self, text: str, why: str) -> None:
        if why not in self.said:
            self.said.add(why)
            log.warning(f"teraio: {text}", why)


def _common_prefix_length(one: Order, other: Order) -> int:
    """How many programs two steps have in common before they part."""
    return next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def _measured_step_ns(step: Step) -> int:
    """From its first slot to its end, waiting included."""
    first = step.calls[0]
    return step.end_ns - (first.at_ns[0] - first.stall_ns[0])
