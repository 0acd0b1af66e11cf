"""Two trained networks that compute one function: ``python results/pair/verify.py``, seconds on a CPU.

Verifies that their weights differ, that their outputs are equal bit for bit, that they still are after one
step of Path-SGD, and that they are not after one step of SGD. Path-SGD is Algorithm 1 of the paper, first
written in plain torch here, then the library's own. The exit code is 1 if something does not hold.

Both were trained on scikit-learn's digits:

    pathsgd train --hidden 32 32 --lr 0.3 --epochs 60 --device cpu --init balanced
    pathsgd train --hidden 32 32 --lr 0.3 --epochs 60 --device cpu --init powers-of-two

The second starts from the weights of the first, with hidden units rescaled as in the paper, each by the power
of two nearest to the paper's factor: multiplying by it rounds nothing. balanced.pt and unbalanced.pt are the
state dicts in their last checkpoints.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import pathsgd

LR = 0.3


def load_network(path: Path) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    net.load_state_dict(torch.load(path, weights_only=True))
    return net


def step_by_algorithm_1(net: nn.Sequential) -> None:
    """w <- w - lr g / (gamma_in gamma_out), for p = 2. A bias is an edge from a unit with gamma_in = 1."""
    layers = [layer for layer in net if isinstance(layer, nn.Linear)]
    gamma_in = [torch.ones(layers[0].in_features)]
    for layer in layers:
        gamma_in.append(layer.weight**2 @ gamma_in[-1] + layer.bias**2)
    gamma_out = [torch.ones(layers[-1].out_features)]
    for layer in reversed(layers):
        gamma_out.insert(0, gamma_out[0] @ layer.weight**2)
    for layer, into, out in zip(layers, gamma_in, gamma_out[1:], strict=False):
        layer.weight -= LR * layer.weight.grad / (out[:, None] * into)
        layer.bias -= LR * layer.bias.grad / out


def step_by_pathsgd(net: nn.Sequential) -> None:
    pathsgd.PathSGD(net, lr=LR).step()


def step_by_sgd(net: nn.Sequential) -> None:
    torch.optim.SGD(net.parameters(), lr=LR).step()


CHECKS: list[tuple[str, Callable[[nn.Sequential], None] | None, bool]] = [
    ("as trained", None, True),
    ("after a step of Path-SGD, by Algorithm 1 in plain torch", step_by_algorithm_1, True),
    ("after a step of Path-SGD, by pathsgd.PathSGD", step_by_pathsgd, True),
    ("after a step of SGD", step_by_sgd, False),
]
"""What is compared, the step before it, and whether the outputs have to be equal."""


def main(folder: Path) -> int:
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
    x -= x.mean(0)
    pair = [load_network(folder / f"{name}.pt") for name in ("balanced", "unbalanced")]
    before = [outputs_of(net, x) for net in pair]
    ratios = torch.cat([(b / a).flatten() for a, b in zip(*(net.parameters() for net in pair), strict=True)])
    rescaled = ratios[ratios.isfinite() & (ratios != 1)]
    if not len(rescaled):
        return fail("the two have the same weights")
    print(f"{(before[0].argmax(1) == y).double().mean():.1%} of {len(y)} images are classified right")
    print(
        f"{len(rescaled)} of {len(ratios)} weights differ, by factors of {rescaled.min()} to {rescaled.max()}"
    )
    for what, step, equal in CHECKS:
        after = [outputs_of(take_step(net, step, x, y), x) for net in pair] if step else before
        if step and torch.equal(after[0], before[0]):
            return fail(f"{what}: the outputs did not change")
        apart = (after[0] - after[1]).abs().max()
        print(
            f"{what}: outputs {'equal bit for bit' if torch.equal(*after) else f'apart by up to {apart:.3g}'}"
        )
        if torch.equal(*after) != equal:
            return fail(f"expected them to be {'equal' if equal else 'apart'}")
    print("verified")
    return 0


@torch.no_grad()
def outputs_of(net: nn.Sequential, x: Tensor) -> Tensor:
    return net(x)


def take_step(
    net: nn.Sequential, step: Callable[[nn.Sequential], None], x: Tensor, y: Tensor
) -> nn.Sequential:
    """A copy of the network after one step on the first hundred images."""
    net = copy.deepcopy(net)
    nn.functional.cross_entropy(net(x[:100]), y[:100]).backward()
    with torch.no_grad():
        step(net)
    return net


def fail(reason: str) -> int:
    print(f"NOT verified: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent))
