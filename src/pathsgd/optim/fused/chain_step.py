"""The step of a whole chain: from both ends to the middle, gamma carried to the next step.

The next gamma_in grows from the first layer, the next gamma_out from the last; each layer extends one of
them in the pass that moves it, and the middle one closes both. For three layers that is all: every weight is
read once and written once, as in SGD. Longer chains read the layers once more for the direction that was
not covered.

Sums that are carried and sums that are made anew are of the same weights in the same order, so that a
training that was interrupted goes on as if it had not been, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pathsgd._torch import Version, is_capturing, versions
from pathsgd.geometry.gamma import Gammas
from pathsgd.graph.chains import Chain
from pathsgd.optim.fused.exponent_frame import fit_frame, give_exponents
from pathsgd.optim.fused.implementation import Implementation, LayerTensors


class ChainStep:
    """A chain with its gammas carried from step to step."""

    def __init__(self, chain: Chain, implementation: Implementation) -> None:
        self.chain = chain
        self.implementation = implementation
        self._versions: list[Version] | None = None

    def start(self, gammas: Gammas, layers: Sequence[LayerTensors], parameters: Sequence[Tensor]) -> bool:
        """Takes gammas that were just measured, for their range; False if they do not fit one exponent per
        vector."""
        self.forget()
        into, out = [], []
        for layer in self.chain:
            gamma = gammas[layer.weight]
            assert gamma.gamma_in is not None
            assert gamma.gamma_out is not None
            into.append(gamma.gamma_in)
            out.append(gamma.gamma_out)
        count, dtype, arithmetic = len(into), self.implementation.dtype, gamma.arithmetic
        if not gammas.exponents and not is_capturing():
            vectors = give_exponents([*into, *out], arithmetic, dtype)
            into, out = vectors[:count], vectors[count:]
        fit = fit_frame(into, out, arithmetic)
        if fit is None:
            return False
        frame, carried = fit
        converted = [x.to(dtype) for x in carried]
        self.implementation.start(converted[:count], converted[count:], frame)
        # What was in range when measured may be too far apart for one exponent, or for fewer bits.
        rounded = any(x.dtype != dtype for x in carried)
        lost = rounded and any(
            bool(((y == 0) & (x > 0)).any()) for x, y in zip(carried, converted, strict=True)
        )
        if (into[0].exponent is not None or rounded) and (lost or not self.implementation.in_range()):
            return False
        with torch.no_grad(), self.implementation.on_device():
            self._sum(layers)
        self._versions = versions(parameters)
        return True

    def _sum(self, layers: Sequence[LayerTensors]) -> None:
        """Both sums of every layer, as a step would have made them."""
        for k in range(len(layers) - 1):
            self.implementation.sum_powers(k, layers[k], into=True, out=False)
        for k in range(len(layers) - 1, 0, -1):
            self.implementation.sum_powers(k, layers[k], into=False, out=True)
        self.implementation.finish()

    def carries(self, parameters: Sequence[Tensor]) -> bool:
        """Whether the carried gammas are those of the weights as they are."""
        if self._versions is None:
            return False
        if is_capturing():
            return True  # what a captured graph replays carries its own gammas
        return self._versions == versions(parameters) and self.implementation.in_range(wait=False)

    def step(self, layers: Sequence[LayerTensors], parameters: Sequence[Tensor]) -> None:
        """One step, in place; the layers are made of these parameters."""
        with torch.no_grad():
            self.implementation.run(layers, self._launch)
        torch.autograd.graph.increment_version(parameters)  # as torch does when it writes
        self._versions = versions(parameters)

    def _launch(self, layers: Sequence[LayerTensors]) -> None:
        count = len(layers)
        middle = count // 2
        implementation = self.implementation
        with implementation.side_stream():
            for k in range(count - 1, middle, -1):
                implementation.update(k, layers[k], into=False, out=True)
        for k in range(middle):
            implementation.update(k, layers[k], into=True, out=False)
        implementation.join()
        implementation.update(middle, layers[middle], into=middle < count - 1, out=middle > 0)
        if count > 3:
            with implementation.side_stream():
                for k in range(middle - 1, 0, -1):
                    implementation.sum_powers(k, layers[k], into=False, out=True)
            for k in range(middle + 1, count - 1):
                implementation.sum_powers(k, layers[k], into=True, out=False)
            implementation.join()
        implementation.finish()

    def forget(self) -> None:
        """Drops the carried gammas."""
        self._versions = None
