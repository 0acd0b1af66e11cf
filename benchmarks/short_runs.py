"""Short trainings at AdamW's usual rate, from usual starts and from rescaled ones, with and without balance.

``python -m benchmarks.short_runs [NETWORK ...]`` trains these anew (a quarter of an hour for all on one core)
and prints the table of results/balance; ``--print`` prints alone.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pathsgd

RECORDS = Path(__file__).parents[1] / "results" / "balance" / "short-runs.json"
STEPS, RATE, SEEDS = 120, 1e-3, range(3)
WAYS = ("AdamW", "balance, AdamW", "BalancedMuon")


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def convolutions() -> nn.Module:
    """Some of them depthwise, as in MobileNet, with batch norm."""
    layers: list[nn.Module] = []
    width = 1
    for channels, groups in ((24, 1), (24, 24), (48, 1), (48, 48)):
        layers += [nn.Conv2d(width, channels, 3, 1 + (groups > 1), 1, groups=groups, bias=False)]
        layers += [nn.BatchNorm2d(channels), nn.ReLU()]
        width = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(48, 4, 192, 0.0, "relu", batch_first=True, norm_first=True)
        self.patches, self.position = nn.Linear(4, 48), nn.Parameter(0.02 * torch.randn(16, 48))
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(48), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(F.unfold(x, 2, stride=2).mT) + self.position
        output: Tensor = self.head(self.norm(self.layers(x)).mean(1))
        return output


class Text(nn.Module):
    """A decoder of transformers, on bytes."""

    def __init__(self, kind: str, **sizes: int) -> None:
        super().__init__()
        import transformers

        config = getattr(transformers, f"{kind}Config")(
            vocab_size=256, bos_token_id=0, eos_token_id=0, **sizes
        )
        name = f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
        self.model = getattr(transformers, name)(config)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x, use_cache=False).logits
        return logits.mT


DECODER = {
    "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "MLP": mlp,
    "convolutions, batch norm": convolutions,
    "ViT": Vit,
    "GPT-2": functools.partial(Text, "GPT2", n_embd=64, n_layer=3, n_head=4),
    "Llama": functools.partial(Text, "Llama", **DECODER),
    "Gemma-2": functools.partial(Text, "Gemma2", **DECODER),
    "Qwen3, experts": functools.partial(
        Text, "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=88, **DECODER
    ),
}


@functools.cache
def load_digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    return torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1), torch.tensor(digits.target)


@functools.cache
def load_bytes() -> tuple[Tensor, Tensor]:
    """Python's standard library, in pieces of 64 bytes and those after each."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:120]
    pieces = torch.tensor(list(b"".join(file.read_bytes() for file in files))).unfold(0, 65, 65)
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))
    return pieces[order, :-1], pieces[order, 1:]


def train(name: str, start: str, way: str, seed: int) -> float:
    """The loss on what was not trained on, after the last step."""
    torch.manual_seed(seed)
    model = NETWORKS[name]()
    x, y = load_bytes() if isinstance(model, Text) else load_digits()
    generator = torch.Generator().manual_seed(seed)
    if start == "rescaled":
        pathsgd.unbalance(model, x[:2], generator=copy.deepcopy(generator))
    if way == "BalancedMuon":
        optimizer: torch.optim.Optimizer = pathsgd.BalancedMuon(model, x[:2])
    else:
        if way == "balance, AdamW":
            pathsgd.balance(model, x[:2])
        optimizer = torch.optim.AdamW(model.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    held_out = min(500, len(x) // 4)
    for _ in range(STEPS):
        rows = torch.randint(held_out, len(x), (16 if isinstance(model, Text) else 64,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return F.cross_entropy(model.eval()(x[:held_out]), y[:held_out]).item()


def tabulate(records: dict[str, dict[str, list[float]]]) -> Iterator[str]:
    columns = [f"{way}, {start}" for way in WAYS for start in ("as made", "rescaled")]
    yield f"| network | {' | '.join(columns)} |"
    yield "|---" * (1 + len(columns)) + "|"
    for name, losses in records.items():
        cells = (f"{fmean(losses[column]):.3f}" for column in columns)
        yield f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--print", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    records = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    for name in () if options.print else options.networks:
        records[name] = {
            f"{way}, {start}": [round(train(name, start, way, seed), 4) for seed in SEEDS]
            for way in WAYS for start in ("as made", "rescaled")
        }  # fmt: skip
        RECORDS.write_text(json.dumps(records, indent=1) + "\n")
    print("\n".join(tabulate(records)))


if __name__ == "__main__":
    main()
