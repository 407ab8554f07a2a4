"""The training of trainee.py by DeepSpeed's ZeRO-3, on one GPU, with parameters and states in host memory or
on a drive.

    zero.py '{"way": "zero-offload", "device": "cuda", "shape": {...}, "folder": "/nvme/zero", ...}'

`way` is `zero-offload` (host memory) or `zero-infinity` (a drive). Its optimizer keeps weights and states in
single precision beside those in bfloat16, as its users have it: losses are not those of the others. It
compiles nothing: its hooks break a graph at every module.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from torch import nn
from trainee import Trainee

from teraio.demo_model import Llama, Shape

DEVICES = {"zero-offload": "cpu", "zero-infinity": "nvme"}
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def configuration(way: str, folder: str) -> dict[str, Any]:
    """As its guide to ZeRO-Infinity has it; a buffer holds the largest weight there is."""
    place: dict[str, Any] = {"device": DEVICES[way], "pin_memory": True}
    if way == "zero-infinity":
        place["nvme_path"] = folder
    pipeline = {"pipeline_read": True, "pipeline_write": True, "buffer_count": 4}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 100_000_000,
            "stage3_param_persistence_threshold": 100_000,
            "offload_optimizer": {**place, **(pipeline if way == "zero-infinity" else {})},
            "offload_param": {**place, "buffer_count": 8, "buffer_size": 200_000_000},
        },
        "aio": {
            "block_size": 1_048_576,
            "queue_depth": 16,
            "intra_op_parallelism": 4,
            "single_submit": False,
            "overlap_events": True,
        },
    }


class Zero(Trainee):
    def _model(self) -> nn.Module:
        os.environ.update({**ALONE, "MASTER_PORT": str(20_000 + os.getpid() % 20_000)})
        import deepspeed

        deepspeed.init_distributed("nccl")
        self.config = configuration(self.asked["way"], self.asked["folder"])
        with deepspeed.zero.Init(config_dict_or_path=self.config):
            return Llama(Shape(**self.asked["shape"]))

    def _optimizer(self) -> torch.optim.Optimizer:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(self.model.parameters(), lr=1e-4, weight_decay=0.01, adamw_mode=True)

    def _compiled(self) -> Any:
        import deepspeed

        engine, *_ = deepspeed.initialize(model=self.model, optimizer=self.optimizer, config=self.config)
        return engine

    def learn(self, *batch: torch.Tensor) -> torch.Tensor:
        engine: Any = self.run
        loss: torch.Tensor = engine(*batch)
        engine.backward(loss)
        engine.step()
        return loss


if __name__ == "__main__":
    print(json.dumps(Zero(json.loads(sys.argv[1])).train()))
