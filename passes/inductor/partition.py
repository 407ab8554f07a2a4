"""Inductor's partitioner with some of what it would save made again (partition.py), and with that in the keys
of its caches: a program of another cut never comes back."""

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
    """`about`: everything that may be asked for, in a stable form."""

    def __init__(self, asked: recompute_cut.Asked, about: str, version: str) -> None:
        self.asked = asked
        self.key = f"{version} {about}"

    def __call__(self, gm: torch.fx.GraphModule, joint_inputs: Any, **settings: Any) -> Any:
        cut = min_cut_rematerialization_partition
        return recompute_cut.cut_with_recompute(
            cut, self.asked, program.largest_kernel_bytes, gm, joint_inputs, **settings
        )

    def uuid(self) -> Any:
        return self.key


def partitioner_config_patch(asked: recompute_cut.Asked | None, about: str, version: str) -> dict[str, Any]:
    """What Inductor's compile is patched with. A partitioner that is there already stays, and some versions
    take none: then nothing is asked for."""
    if asked is None or not hasattr(config, SETTING) or getattr(config, SETTING) is not None:
        return {}
    return {SETTING: RecomputePartitioner(asked, about, version)}


def refuse_other_partitioner(wanted: bool) -> None:
    """`recompute=auto` needs the place that another partitioner has."""
    if wanted and getattr(config, SETTING, None) is not None:
        raise UnsupportedError(
            f"option 'recompute' is auto, and torch._inductor.config.{SETTING} is set: it decides what is "
            f"saved for the backward, and so would teraio. Set it to None, or leave recompute off"
        )
    if wanted and not hasattr(config, SETTING):
        raise UnsupportedError(
            f"option 'recompute' is auto, but Inductor in torch {torch.__version__} lets no one decide what "
            f"is saved for the backward ({SETTING}). Use a newer torch, or inner='eager'"
        )
