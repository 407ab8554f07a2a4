"""A partitioner for Inductor: torch's own partitioner, with some saved tensors recomputed
(`capture/recompute_cut.py`).

A description of the nodes that may be recomputed is part of the keys of Inductor's caches. The caches
therefore never return a program that was compiled with another cut into forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from teraio.errors import UnsupportedError

from ..capture import recompute_cut
from ..fx import program

SETTING = "custom_partitioner_fn"


class RecomputePartitioner(CustomPartitionerFn):
    """A partitioner that recomputes the nodes that `choose` names.

    `about` describes all nodes that `choose` may name. The description is the same in every process.
    """

    def __init__(self, choose: recompute_cut.ChooseRecompute, about: str, version: str) -> None:
        self.choose = choose
        self.key = f"{version} {about}"

    def __call__(self, gm: torch.fx.GraphModule, joint_inputs: Any, **settings: Any) -> Any:
        cut = min_cut_rematerialization_partition
        return recompute_cut.cut_with_recompute(
            cut, self.choose, program.largest_kernel_bytes, gm, joint_inputs, **settings
        )

    def uuid(self) -> Any:
        return self.key


def partitioner_config_patch(
    choose: recompute_cut.ChooseRecompute | None, about: str, version: str
) -> dict[str, Any]:
    """Return the settings for Inductor's config that set the partitioner.

    Return no settings if `choose` is None, if another partitioner is set, or if torch has no setting for a
    partitioner.
    """
    if choose is None or not hasattr(config, SETTING) or getattr(config, SETTING) is not None:
        return {}
    return {SETTING: RecomputePartitioner(choose, about, version)}


def refuse_other_partitioner(wanted: bool) -> None:
    """Raise UnsupportedError if recomputation is `wanted`, but Inductor cannot use our partitioner."""
    if wanted and getattr(config, SETTING, None) is not None:
        raise UnsupportedError(
            f"option 'recompute' is auto, and torch._inductor.config.{SETTING} is set: only one of the two "
            f"can choose the tensors that are saved for the backward. Set it to None, or turn recompute off"
        )
    if wanted and not hasattr(config, SETTING):
        raise UnsupportedError(
            f"option 'recompute' is auto, but Inductor in torch {torch.__version__} has no setting to choose "
            f"the tensors saved for the backward ({SETTING}). Use a newer torch, or inner='eager'"
        )
