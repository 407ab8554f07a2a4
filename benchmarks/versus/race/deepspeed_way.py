"""DeepSpeed's ZeRO-3 with parameters and optimizer states on `offload`: none, cpu or nvme.

DeepSpeed derives no settings from a budget or the machine. So deepspeed.json beside this file has two sets:
the settings that the sweep tries, and the best settings. The optimizer is DeepSpeed's CPU Adam. The model is
not compiled, because ZeRO-3 breaks the graph at every module.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from race.models import Batch, Subject

SETTINGS = Path(__file__).with_name("deepspeed.json")
ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "DS_ACCELERATOR": "cpu",
}


def configuration(request: dict[str, Any]) -> dict[str, Any]:
    settings = {**json.loads(SETTINGS.read_text())["settings"], **request.get("settings", {})}
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": settings["sub_group_size"],
            "reduce_bucket_size": settings["reduce_bucket_size"],
            "stage3_max_live_parameters": settings["max_live_parameters"],
            "stage3_max_reuse_distance": settings["max_reuse_distance"],
            "stage3_prefetch_bucket_size": settings["prefetch_bucket_size"],
            "stage3_param_persistence_threshold": settings["persistence_threshold"],
        },
        "aio": settings["aio"],
    }
    device = request["offload"]
    if device != "none":
        place: dict[str, Any] = {"device": device, "pin_memory": settings["pin_memory"]}
        if device == "nvme":
            place["nvme_path"] = request["folder"]
        buffers = settings["buffer_count"]
        zero = found["zero_optimization"]
        zero["offload_optimizer"] = {
            **place,
            "buffer_count": buffers,
            "pipeline_read": settings["pipeline"],
            "pipeline_write": settings["pipeline"],
        }
        zero["offload_param"] = {**place, "buffer_count": buffers, "buffer_size": settings["buffer_size"]}
    return found


class DeepSpeed:
    def __init__(self, subject: Subject, request: dict[str, Any]) -> None:
        os.environ.update({**ALONE, "MASTER_PORT": str(20_000 + os.getpid() % 20_000)})
        import deepspeed

        deepspeed.init_distributed("gloo")
        config = configuration(request)
        # The type is set to float32 in `config`, because without float16 DeepSpeed ignores the argument
        # `dtype`.
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = subject.make()
        other = {p.dtype for p in model.parameters()} - {torch.float32}
        assert not other, f"DeepSpeed would train in {other}, teraio in float32"
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=self.optimizer(model, request), config=config
        )

    @staticmethod
    def optimizer(model: torch.nn.Module, request: dict[str, Any]) -> torch.optim.Optimizer:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(model.parameters(), lr=3e-4, weight_decay=0.01, adamw_mode=True)

    def step(self, batch: Batch) -> torch.Tensor:
        loss = self.engine(*batch)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def figures(self) -> dict[str, int]:
        return {}

    def settled(self) -> bool:
        return True
