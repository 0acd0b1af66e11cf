"""Five small networks, trained as usual, whose weights lie in ``results/uses/checkpoints``.

``python -m benchmarks.uses.networks NAME --data FOLDER`` trains one again: 10 to 20 minutes on a CPU core.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.ao.quantization.quantize_fx import fuse_fx

from benchmarks.league.deep_networks import head, mobilenet_v2
from benchmarks.league.seen import Causal
from benchmarks.league.tasks import Images, Task, cifar, text
from benchmarks.league.tuned_on import OnPatches, TransformerBlock
from benchmarks.networks import ResNet

CHECKPOINTS = Path(__file__).parents[2] / "results" / "uses" / "checkpoints"


def resnet_18() -> nn.Module:
    """The layers of ResNet-18, a quarter as wide, with the stem for small images."""
    model = ResNet(16, classes=10)
    model.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(True))
    return model


def vgg() -> nn.Module:
    """The layers of VGG-11 with batch norm, a quarter as wide."""
    layers: list[nn.Module] = []
    channels = 3
    for stage in ((16,), (32,), (64, 64), (128, 128), (128, 128)):
        for out in stage:
            layers += [nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(True)]
            channels = out
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, *head(channels))


def vit() -> nn.Module:
    """Six blocks over the 64 patches of an image."""
    blocks: list[nn.Module] = [TransformerBlock(64, 4, nn.GELU, causal=False, bias=True) for _ in range(6)]
    return OnPatches(3, 32, 4, 64, blocks, positions=True)


def llama() -> nn.Module:
    """A language model of bytes of four layers, from transformers."""
    return Causal(
        "llama", 128, hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=128,
    )  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """A network, its data, and how it is trained."""

    label: str
    build: Callable[[], nn.Module]
    task: Callable[[Path], Task]
    adamw: bool

    def load(self) -> nn.Module:
        model = self.build()
        state = torch.load(CHECKPOINTS / f"{name_of(self)}.pt", weights_only=True)
        model.load_state_dict(
            {name: value.to(model.state_dict()[name].dtype) for name, value in state.items()}
        )
        return model.eval()


def _images(epochs: int) -> Callable[[Path], Task]:
    return lambda folder: replace(cifar(folder, "cpu"), augment="crop", steps=156 * epochs)


def _bytes(folder: Path) -> Task:
    return text("cpu", context=128, batch=64, steps=800)


NETWORKS = {
    "mobilenet-v2": Trained("MobileNetV2", mobilenet_v2, _images(20), adamw=False),
    "resnet-18": Trained("ResNet-18", resnet_18, _images(15), adamw=False),
    "vgg": Trained("VGG-11, batch norm", vgg, _images(25), adamw=False),
    "vit": Trained("ViT, GELU", vit, _images(15), adamw=True),
    "llama": Trained("Llama, bytes", llama, _bytes, adamw=True),
}


def first_images(task: Images, count: int = 2000) -> Images:
    """The task with fewer images to test on."""
    x, y = task.held_out["test"]
    return replace(task, held_out={"test": (x[:count], y[:count])})


def fold(model: nn.Module) -> nn.Module:
    """With batch norms in the convolutions before them, where there are any. torch leaves the biases that it
    adds frozen; here they are trained."""
    has_norms = any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    model = copy.deepcopy(model)  # what is not fused would be shared
    return fuse_fx(model).requires_grad_() if has_norms else model


def name_of(network: Trained) -> str:
    return next(name for name, other in NETWORKS.items() if other is network)


def train(network: Trained, task: Task) -> nn.Module:
    """SGD with momentum at 0.1 and decay 5e-4, or AdamW at 1e-3 and 0.05; 5% warm-up and a cosine."""
    torch.manual_seed(0)
    model = network.build()
    if not network.adamw:
        model = model.to(memory_format=torch.channels_last)  # convolutions in two thirds of the time
    if network.adamw:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.05)
    else:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    warm_up = task.steps // 20
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda t: min(
            (t + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * max(0, t - warm_up) / (task.steps - warm_up))
        ),
    )
    generator = torch.Generator().manual_seed(0)
    for step, batch in enumerate(task.batches(model, generator, task.steps)):
        loss = task.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(step, f"{loss.item():.3f}", flush=True)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=NETWORKS)
    parser.add_argument("--data", type=Path, default=Path("data"))
    options = parser.parse_args()
    network = NETWORKS[options.name]
    task = network.task(options.data)
    model = train(network, task)
    state = {
        name: value.half() if value.is_floating_point() else value
        for name, value in model.state_dict().items()
    }
    torch.save(state, CHECKPOINTS / f"{options.name}.pt")
    print(task.evaluate(network.load(), "test"))


if __name__ == "__main__":
    main()
