"""Tensors that only reference cycles hold.

What Dynamo traced refers to itself, and to tensors that it read. If a traced module replaces an attribute, as
`torch.nn.utils.prune` does, the old tensor and its graph live on, and the graph has saved weights. Python's
own collector finds them many steps later; until then those weights cannot leave.
"""

from __future__ import annotations

import gc

from .programs import Program
from .residency import Residency


class Garbage:
    def __init__(self, residency: Residency) -> None:
        self.residency = residency
        self.collected_at = 0  # programs made by then

    def collect(self) -> None:
        """Collect once after programs were made, if anything keeps a weight or a state in memory."""
        if self.collected_at == Program.made_count:
            return
        if any(record.held or record.aliased for record in self.residency.reachable.values()):
            self.collected_at = Program.made_count
            gc.collect()
