"""ReLU6 with a bound for each channel, so that its units can be rescaled."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pathsgd._torch import tree_leaves, tree_map
from pathsgd.errors import PathError
from pathsgd.graph.path_graph import unwrap
from pathsgd.graph.restoring import restore_modules
from pathsgd.graph.trace import Example, as_inputs


class ClippedReLU(nn.Module):
    """``min(max(x, 0), bound)`` with a bound for each channel, the second axis of x.

    Scaled by c, x has to be clipped at c times the bound: a rescaling does that, where ReLU6 has its 6.

    Args:
        channels: how many bounds.
        bound: all of them, at first.

    Example:
        >>> ClippedReLU(2, bound=6.0)(torch.tensor([[-1.0, 9.0]])).tolist()
        [[0.0, 6.0]]
    """

    def __init__(self, channels: int, bound: float) -> None:
        super().__init__()
        self.bound = nn.Parameter(torch.full((channels,), bound), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """The clipped input.

        Args:
            x: any input with channels along its second axis.

        Returns:
            A tensor of its shape.
        """
        return torch.minimum(x.relu(), self.bound.view(-1, *[1] * (x.dim() - 2)))


@torch.no_grad()
def replace_relu6(model: nn.Module, example_input: Example) -> None:
    """Replaces ``nn.ReLU6``, where the example runs it, in place by :class:`ClippedReLU`. The function stays.

    Call it before :func:`pathsgd.balance` on MobileNets: behind a ReLU6 no unit can be rescaled. Tools that
    put a ReLU there change the function. ``F.relu6``, ``nn.Hardtanh`` and subclasses of ``nn.ReLU6`` stay.

    Args:
        model: the module to change; it is run once, in evaluation mode, and stays in the mode it is in.
        example_input: as in :func:`pathsgd.trace`.

    Raises:
        PathError: one module clips numbers of channels that differ, or tensors of one or three axes; or the
            function would change, as where a module writes in place or has hooks.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU6(), nn.Linear(3, 1))
        >>> replace_relu6(model, torch.ones(1, 2))
        >>> model[1].bound
        Parameter containing:
        tensor([6., 6., 6.])
    """
    model = unwrap(model)
    args, kwargs = as_inputs(model, example_input)
    outputs: dict[nn.Module, list[Tensor]] = {m: [] for m in model.modules() if type(m) is nn.ReLU6}

    def compute() -> list[Tensor]:
        # Copies, since memory may be written to again; and of inputs, which the model may write to.
        own_args, own_kwargs = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (args, kwargs))
        with restore_modules(model):
            for module in outputs:
                module.register_forward_hook(lambda module, _, x: outputs[module].append(x))
            results = tree_leaves(model.eval()(*own_args, **own_kwargs))
        return [x.clone() for x in results if isinstance(x, Tensor)]

    before = compute()
    places = list(model.named_modules(remove_duplicate=False))
    clipped: dict[nn.Module, ClippedReLU] = {}
    for name, module in places:
        if not name and module in outputs:
            raise PathError("the model is a ReLU6 itself")
        if x := outputs.get(module):
            if any(one.dim() in (0, 1, 3) for one in x):
                raise PathError(f"{name!r} clips a tensor of {x[0].dim()} axes, of which channels may be any")
            channels = {one.shape[1] for one in x}
            if len(channels) > 1:
                raise PathError(f"{name!r} clips {sorted(channels)} channels; give each place its own ReLU6")
            clipped.setdefault(module, ClippedReLU(channels.pop(), 6.0).to(x[0]))

    def put(instead: Mapping[nn.Module, nn.Module]) -> None:
        for name, module in places:
            if module in clipped:
                model.set_submodule(name, instead.get(module, module))

    put(clipped)
    if any(not torch.equal(a, b) for a, b in zip(before, compute(), strict=True)):
        put({})
        names = ", ".join(name for name, module in places if module in clipped)
        raise PathError(
            f"the function would change, as where one of {names} writes in place to what something else "
            "reads, or has hooks; the model is left as it was"
        )
