"""Training loops of Lightning, diffusers, torch_geometric, torchvision, opacus and other libraries."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from strangers.case import Compile
from strangers.loops_parts import (
    CLASSES,
    GIVEN,
    Convolutions,
    Perceptron,
    fit,
    images,
    random,
    rows,
)

Loop = Callable[[Compile], Iterable[Any]]


def vectors(count: int) -> TensorDataset:
    drawn = random()
    labels = torch.randint(0, CLASSES, (count,), generator=drawn)
    return TensorDataset(torch.randn(count, GIVEN, generator=drawn), labels)


def lightning_owner(**more: Any) -> Any:
    import lightning

    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )


def lightning_plain(compile: Compile, **more: Any) -> Iterable[Any]:
    """Train a Lightning module with gradient accumulation, clipping, validation and optional callbacks."""
    import lightning

    losses: list[float] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = compile(Perceptron())

        def training_step(self, batch: Any, index: int) -> Any:
            loss = functional.cross_entropy(self.model(batch[0]), batch[1])
            losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            losses.append(functional.cross_entropy(self.model(batch[0]), batch[1]).item())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    module = Module()
    settings = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 1.0} | more
    loaders = DataLoader(vectors(96), batch_size=16), DataLoader(vectors(32), batch_size=16)
    lightning_owner(**settings).fit(module, *loaders)
    return [*losses, module]


def lightning_averages(compile: Compile) -> Iterable[Any]:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    return lightning_plain(
        compile, callbacks=[StochasticWeightAveraging(1e-2, swa_epoch_start=1)], max_epochs=3
    )


def lightning_gan(compile: Compile) -> Iterable[Any]:
    """Optimize two models manually, as in Lightning's GAN example."""
    import lightning

    losses: list[float] = []

    class Gan(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.painter = compile(Perceptron(made=GIVEN))
            self.critic = compile(Perceptron(made=1))

        def criterion(self, x: torch.Tensor, real: float) -> torch.Tensor:
            out = self.critic(x)
            return functional.binary_cross_entropy_with_logits(out, torch.full_like(out, real))

        def training_step(self, batch: Any, index: int) -> None:
            both: Any = self.optimizers()
            of_painter, of_critic = both
            self.toggle_optimizer(of_painter)
            loss = self.loss_against(self.painter(torch.randn(16, GIVEN)), 1.0)
            self.manual_backward(loss)
            of_painter.step()
            of_painter.zero_grad()
            self.untoggle_optimizer(of_painter)
            self.toggle_optimizer(of_critic)
            fake = self.painter(torch.randn(16, GIVEN)).detach()
            other = (self.loss_against(batch[0], 1.0) + self.loss_against(fake, 0.0)) / 2
            self.manual_backward(other)
            of_critic.step()
            of_critic.zero_grad()
            self.untoggle_optimizer(of_critic)
            losses.extend([loss.item(), other.item()])

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(m.parameters(), lr=2e-4) for m in (self.painter, self.critic)], []

    module = Gan()
    lightning_owner(max_epochs=1).fit(module, DataLoader(vectors(96), batch_size=16))
    return [*losses, module]


def diffusion(compile: Compile) -> Iterable[Any]:
    """Train a UNet of diffusers to predict noise. EMAModel of diffusers averages the weights."""
    from diffusers import DDPMScheduler, UNet2DModel
    from diffusers.training_utils import EMAModel

    torch.manual_seed(0)
    model: Any = UNet2DModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    compile(model)
    ema = EMAModel(model.parameters(), decay=0.9, model_cls=UNet2DModel, model_config=model.config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    noises: Any = DDPMScheduler(num_train_timesteps=100)
    for x, _ in images(4):
        noise, when = torch.randn_like(x), torch.randint(0, 100, (len(x),))
        found = model(noises.add_noise(x, noise, when), when).sample
        loss = functional.mse_loss(found, noise)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ema.step(model.parameters())
        yield loss.item()
    ema.store(model.parameters())
    ema.copy_to(model.parameters())
    with torch.no_grad():
        yield float(model(x, 5).sample.norm())
    ema.restore(model.parameters())
    yield from (model, ema.shadow_params, optimizer)


def graphs(compile: Compile, kind: str) -> Iterable[Any]:
    """Train a graph network on batches with different numbers of nodes and edges."""
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GATConv, GCNConv, SAGEConv, global_mean_pool

    conv = {"gcn": GCNConv, "gat": GATConv, "sage": SAGEConv}[kind]

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList([conv(16, 256), conv(256, 256), conv(256, 256)])
            self.last = nn.Linear(256, CLASSES)

        def forward(self, x: torch.Tensor, edges: torch.Tensor, batch: torch.Tensor, count: int) -> Any:
            for layer in self.convs:
                x = layer(x, edges).relu()
            return self.last(global_mean_pool(x, batch, count))

    def graph(nodes: int, drawn: torch.Generator) -> Data:
        edges = torch.randint(0, nodes, (2, 3 * nodes), generator=drawn)
        return Data(
            x=torch.randn(nodes, 16, generator=drawn), edge_index=edges, y=torch.tensor([nodes % CLASSES])
        )

    model, drawn = compile(Network(), dynamic=True), random()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(6):
        batch: Any = Batch.from_data_list([graph(8 + step + number, drawn) for number in range(4)])
        loss = functional.cross_entropy(model(batch.x, batch.edge_index, batch.batch, 4), batch.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()
    yield from (model, optimizer)


def detects(compile: Compile, kind: str) -> Iterable[Any]:
    """Train a detector of torchvision on images with different numbers and sizes of boxes."""
    from torchvision.models import detection, mobilenet_v3_small

    torch.manual_seed(0)
    none: dict[str, Any] = {"weights": None, "weights_backbone": None}
    model: Any
    if kind == "ssdlite":
        model = detection.ssdlite320_mobilenet_v3_large(num_classes=4, **none)
    else:
        backbone: Any = mobilenet_v3_small(weights=None).features
        backbone.out_channels = 576
        anchors = detection.rpn.AnchorGenerator(((16, 32),), ((0.5, 1.0),))
        sizes = {"min_size": 96, "max_size": 128, "rpn_pre_nms_top_n_train": 50, "box_detections_per_img": 10}
        heads = {"box_head": detection.faster_rcnn.TwoMLPHead(576 * 49, 64)}
        predictor = detection.faster_rcnn.FastRCNNPredictor(64, 4)
        model = detection.FasterRCNN(
            backbone, rpn_anchor_generator=anchors, box_predictor=predictor, **heads, **sizes
        )
    compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    drawn = random()
    for step in range(3):
        given = [torch.rand(3, 80 + 8 * step, 96, generator=drawn) for _ in range(2)]
        corners = [torch.rand(2 + step, 2, generator=drawn) * 40 for _ in given]
        targets = [
            {"boxes": torch.cat([c, c + 30], 1), "labels": torch.arange(len(c)) % 3 + 1} for c in corners
        ]
        losses = model(given, targets)
        loss = sum(losses.values(), torch.zeros(()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()
    yield from (model, optimizer)


def private(compile: Compile) -> Iterable[Any]:
    """Train with opacus, whose hooks compute the gradient of each sample."""
    from opacus import PrivacyEngine

    model: Any = Perceptron()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader: Any = DataLoader(vectors(64), batch_size=16)
    model, optimizer, loader = PrivacyEngine(secure_mode=False).make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        noise_generator=random(),
    )
    compile(model)
    for x, y in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        yield loss.item()
    yield model.state_dict()


def segments(compile: Compile, library: str) -> Iterable[Any]:
    """Train a UNet of segmentation_models_pytorch or of MONAI, with the same library's loss."""
    torch.manual_seed(0)
    model: Any
    criterion: Any
    if library == "smp":
        import segmentation_models_pytorch as smp

        model = smp.Unet(
            "mobilenet_v2", encoder_weights=None, classes=4, decoder_channels=(64, 32, 16, 16, 8)
        )
        criterion = smp.losses.DiceLoss("multiclass")
    else:
        from monai.losses import DiceCELoss
        from monai.networks.nets import UNet

        model = UNet(2, 3, 4, channels=(32, 64, 128), strides=(2, 2), num_res_units=1)
        criterion = DiceCELoss(to_onehot_y=True, softmax=True)
    compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, _ in images(4, size=32):
        mask = (x[:, :1] > 0).long() + (x[:, 1:2] > 0).long()
        loss = criterion(model(x), mask if library == "monai" else mask[:, 0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()
    yield from (model, optimizer)


def timm_loop(compile: Compile) -> Iterable[Any]:
    """Train as timm's training script does: with mixup, label smoothing, timm's weight average and timm's
    schedule.
    """
    import timm
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler
    from timm.utils import ModelEmaV3, dispatch_clip_grad

    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=3, num_classes=CLASSES)
    compile(model)
    ema = ModelEmaV3(model, decay=0.9)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, layer_decay=0.8)
    schedule = CosineLRScheduler(optimizer, t_initial=5, warmup_t=2)
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=CLASSES, label_smoothing=0.1)
    for number, (x, y) in enumerate(images(4, size=32)):
        x, y = mixup(x, y)  # noqa: PLW2901
        loss = SoftTargetCrossEntropy()(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        dispatch_clip_grad(model.parameters(), 0.02, mode="agc")
        optimizer.step()
        ema.update(model, step=number)
        schedule.step(number + 1)
        yield loss.item()
    yield from (model, ema, optimizer)


def average_by_ema_pytorch(compile: Compile) -> Iterable[Any]:
    from ema_pytorch import EMA

    model = compile(Perceptron())
    ema = EMA(model, beta=0.9, update_after_step=1, update_every=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        yield from fit(model, optimizer, 2)
        ema.update()
    with torch.no_grad():
        yield float(ema(next(iter(rows()))[0]).norm())
    yield from (model, ema.ema_model.state_dict(), optimizer)


def counts_with_torchmetrics(compile: Compile) -> Iterable[Any]:
    from torchmetrics.classification import MulticlassAccuracy

    model, metric = compile(Convolutions()), MulticlassAccuracy(CLASSES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in images():
        logits = model(x)
        loss = functional.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metric.update(logits, y)
        yield loss.item()
    yield from (float(metric.compute()), model, optimizer)


def quantization_of_torchao(compile: Compile) -> Iterable[Any]:
    """Train with torchao's fake quantization, then convert a copy of the model to a quantized model."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.qat import QATConfig

    model = Perceptron()
    four: Any = torch.int4  # type: ignore[attr-defined]
    base = Int8DynamicActivationIntxWeightConfig(weight_dtype=four, weight_granularity=PerGroup(32))
    quantize_(model, QATConfig(base, step="prepare"))
    compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    yield from (*fit(model, optimizer), model.state_dict(), optimizer)
    with contextlib.suppress(NotImplementedError):
        quantize_(copy.deepcopy(model), QATConfig(base, step="convert"))


LOOPS: dict[str, Loop] = {
    "lightning": lightning_plain,
    "lightning_averages": lightning_averages,
    "lightning_gan": lightning_gan,
    "diffusion": diffusion,
    **{f"graphs_{kind}": partial(graphs, kind=kind) for kind in ("gcn", "gat", "sage")},
    **{f"detects_{kind}": partial(detects, kind=kind) for kind in ("ssdlite", "faster_rcnn")},
    "private": private,
    "segments_smp": partial(segments, library="smp"),
    "segments_monai": partial(segments, library="monai"),
    "timm": timm_loop,
    "average_by_ema_pytorch": average_by_ema_pytorch,
    "counts_with_torchmetrics": counts_with_torchmetrics,
    "quantization_of_torchao": quantization_of_torchao,
}
