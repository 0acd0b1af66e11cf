"""CartPole-v1 of OpenAI's Gym for many carts at once, and the training of a policy for it by PPO."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .tasks import Batch, Part

SEEDS: dict[Part, int] = {"valid": 1, "test": 2}

GRAVITY, CART, POLE, HALF_LENGTH, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
FARTHEST, STEEPEST = 2.4, 12 * 2 * math.pi / 360


def start(count: int, generator: torch.Generator) -> Tensor:
    """Carts at rest but for noise: position, its speed, the angle of the pole, its speed."""
    return 0.1 * torch.rand(count, 4, generator=generator, device=generator.device) - 0.05


def move(state: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The next states, and which poles have fallen or carts have left the track."""
    _, speed, angle, turning = state.unbind(1)
    force = torch.where(right, FORCE, -FORCE)
    cosine, sine, mass = angle.cos(), angle.sin(), CART + POLE
    push = (force + POLE * HALF_LENGTH * turning.square() * sine) / mass
    turn = (GRAVITY * sine - cosine * push) / (HALF_LENGTH * (4 / 3 - POLE * cosine.square() / mass))
    change = torch.stack([speed, push - POLE * HALF_LENGTH * turn * cosine / mass, turning, turn], 1)
    state = state + SECONDS * change
    return state, (state[:, 0].abs() > FARTHEST) | (state[:, 2].abs() > STEEPEST)


@dataclass(frozen=True)
class CartPole:
    """PPO with the constants of CleanRL, but for more carts at once, and without the clipping of values.

    The model makes of states (n, 4) the scores of left and right and the value of the state, (n, 3). Every
    step of an episode is rewarded by 1.

    Attributes:
        carts, horizon, passes: so many play for so many steps, which are then gone through so often.
        episodes: of an evaluation.
        longest: steps after which an episode ends in any case.
        discount, trace: gamma and lambda of the advantages.
        clip, entropy, value: of the loss.
    """

    device: str
    steps: int = 960
    batch: int = 512
    metric: str = "inverse return"
    data_hash: str = ""
    carts: int = 32
    horizon: int = 64
    passes: int = 4
    episodes: int = 200
    longest: int = 500
    discount: float = 0.99
    trace: float = 0.95
    clip: float = 0.2
    entropy: float = 0.01
    value: float = 0.5

    @property
    def example(self) -> Tensor:
        return torch.zeros(1, 4, device=self.device)

    def batches(self, model: nn.Module, generator: torch.Generator, steps: int) -> Iterator[Batch]:
        """Plays with the model as it is now, and goes through what was played some times, in random order."""
        state, age = start(self.carts, generator), torch.zeros(self.carts, device=self.device)
        made = 0
        while made < steps:
            state, age, played = self._play(model, state, age, generator)
            for _ in range(self.passes):
                order = torch.randperm(len(played[0]), generator=generator, device=self.device)
                for rows in order.split(self.batch):
                    if made == steps:
                        return
                    made += 1
                    yield tuple(each[rows] for each in played)

    @torch.no_grad()
    def _play(
        self, model: nn.Module, state: Tensor, age: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, Batch]:
        """The states and ages of the carts after a while; and states, actions, their log-probabilities,
        advantages and returns on the way, one cart after another."""
        states, actions, logs, values, ends = [], [], [], [], []
        for _ in range(self.horizon):
            scores, value = model(state).split([2, 1], dim=1)
            log = scores.log_softmax(1)
            right = _chance(self.carts, generator) < log[:, 1].exp()
            states.append(state)
            actions.append(right.long())
            logs.append(torch.where(right, log[:, 1], log[:, 0]))
            values.append(value[:, 0])
            state, fallen = move(state, right)
            age = age + 1
            end = fallen | (age >= self.longest)
            ends.append(end)
            state = torch.where(end[:, None], start(self.carts, generator), state)
            age = torch.where(end, 0.0, age)
        values.append(model(state)[:, 2])
        advantages = self._advantages(torch.stack(values), torch.stack(ends))
        returns = advantages + torch.stack(values[:-1])
        played = (torch.stack(states), torch.stack(actions), torch.stack(logs), advantages, returns)
        return state, age, tuple(each.flatten(0, 1) for each in played)

    def _advantages(self, values: Tensor, ends: Tensor) -> Tensor:
        """Generalised advantage estimation, from (horizon + 1, carts) values; an end is worth nothing."""
        goes_on = (~ends).float()
        surprise = 1 + self.discount * goes_on * values[1:] - values[:-1]
        advantages, later = [], torch.zeros_like(values[0])
        for k in reversed(range(len(ends))):
            later = surprise[k] + self.discount * self.trace * goes_on[k] * later
            advantages.append(later)
        return torch.stack(advantages[::-1])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        state, action, old_log, advantage, returns = batch
        scores, value = model(state).split([2, 1], dim=1)
        log = scores.log_softmax(1)
        ratio = (log.gather(1, action[:, None])[:, 0] - old_log).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        gain = torch.minimum(ratio * advantage, clipped * advantage).mean()
        spread = -(log.exp() * log).sum(1).mean()
        return self.value * 0.5 * F.mse_loss(value[:, 0], returns) - gain - self.entropy * spread

    @torch.no_grad()
    def evaluate(self, model: nn.Module, part: Part) -> dict[str, float]:
        """Of the policy, as random as it is. Compared is the longest episode's return divided by the mean
        return, 1 at best; the difference of the two can be 0, and then has no ratio."""
        generator = torch.Generator(self.device).manual_seed(SEEDS[part])
        state = start(self.episodes, generator)
        total, stands = torch.zeros(self.episodes, device=self.device), torch.ones_like(state[:, 0])
        for _ in range(self.longest):
            total += stands
            right = _chance(self.episodes, generator) < model(state)[:, :2].softmax(1)[:, 1]
            state, fallen = move(state, right)
            stands = stands * ~fallen
            state = state * stands[:, None]  # what has fallen does not overflow
        mean = total.mean().item()
        return {"inverse return": self.longest / mean, "return": mean}


def _chance(count: int, generator: torch.Generator) -> Tensor:
    return torch.rand(count, generator=generator, device=generator.device)
