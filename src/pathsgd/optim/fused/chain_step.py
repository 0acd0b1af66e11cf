"""The step of a whole chain: from both ends to the middle, gamma carried to the next step.

The forward chain of next gammas grows from the first layer, the backward chain from the last; each layer
extends one of them in the pass that moves it, and the middle one closes both. For three layers that is all:
every weight is read once and written once, as in SGD. Longer chains read the layers once more for the
direction that was not covered.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pathsgd.geometry.gamma import Gammas
from pathsgd.graph.chains import Chain
from pathsgd.optim.fused.exponent_frame import framed
from pathsgd.optim.fused.implementation import Implementation, LayerTensors
from pathsgd.optim.watch import Stamp, blind, stamps


class ChainStep:
    """A chain with its gammas carried from step to step."""

    def __init__(self, chain: Chain, implementation: Implementation) -> None:
        self.chain = chain
        self.implementation = implementation
        self._stamps: list[Stamp] | None = None

    def measured(self, scales: Gammas, parameters: Sequence[Tensor]) -> bool:
        """Takes gammas that were just measured from the weights; False if they do not fit plain floats."""
        self.forget()
        into, out = [], []
        for layer in self.chain:
            gamma = scales[layer.weight]
            assert gamma.gamma_in is not None
            assert gamma.gamma_out is not None
            into.append(gamma.gamma_in)
            out.append(gamma.gamma_out)
        found = framed(into, out, gamma.arithmetic)
        if found is None:
            return False
        frame, carried = found
        count = len(into)
        dtype = self.implementation.dtype
        gammas = [x.to(dtype) for x in carried]
        self.implementation.start(gammas[:count], gammas[count:], frame)
        # What was in range as it was measured may be too far apart for one exponent, or for fewer bits.
        lowered = any(x.dtype != dtype for x in carried)
        lost = lowered and any(bool(((y == 0) & (x > 0)).any()) for x, y in zip(carried, gammas, strict=True))
        if (scales.exponents or lowered) and (lost or not self.implementation.in_range()):
            return False
        self._stamps = stamps(parameters)
        return True

    def carries(self, parameters: Sequence[Tensor]) -> bool:
        """Whether the gammas carried here are those of the weights as they stand."""
        if self._stamps is None:
            return False
        if blind():
            return True  # a captured graph cannot look; what it replays carries its own
        return self._stamps == stamps(parameters) and self.implementation.trusted()

    def step(self, layers: Sequence[LayerTensors], parameters: Sequence[Tensor]) -> None:
        """One step, in place; ``parameters`` are those the layers show."""
        self.implementation.run(layers, self._launch)
        for parameter in parameters:
            torch.autograd.graph.increment_version(parameter)  # as any write of torch's own does
        self._stamps = stamps(parameters)

    def _launch(self, layers: Sequence[LayerTensors]) -> None:
        count = len(layers)
        middle = count // 2
        implementation = self.implementation
        with implementation.aside():
            for k in range(count - 1, middle, -1):
                implementation.update(k, layers[k], into=False, out=True)
        for k in range(middle):
            implementation.update(k, layers[k], into=True, out=False)
        implementation.join()
        implementation.update(middle, layers[middle], into=middle < count - 1, out=middle > 0)
        if count > 3:
            with implementation.aside():
                for k in range(middle - 1, 0, -1):
                    implementation.sums(k, layers[k], into=False, out=True)
            for k in range(middle + 1, count - 1):
                implementation.sums(k, layers[k], into=True, out=False)
            implementation.join()
        implementation.finish()

    def forget(self) -> None:
        """The weights were written by somebody else."""
        self._stamps = None
