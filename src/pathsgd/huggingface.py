"""The optimizers for Hugging Face's Trainer, which makes its optimizer by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from pathsgd import BalancedMuon


def trainer_optimizer(
    optimizer_class: Callable[..., Optimizer] = BalancedMuon, example_input: Any = None, **options: Any
) -> tuple[type[_Factory], dict[str, Any]]:
    """Returns the pair that ``Trainer`` takes as ``optimizer_cls_and_kwargs``.

    An optimizer class given there is called with parameters, which do not say what their paths are. What is
    returned here is called with the model: when training begins, so that ``model_init`` works too.

    ``learning_rate`` and ``weight_decay`` of ``TrainingArguments`` are not passed on: name both here. The
    schedule, by default linear to zero, acts on ``lr`` as always.

    Args:
        optimizer_class: :class:`pathsgd.BalancedMuon` or :class:`pathsgd.PathSGD`.
        example_input: as these take it. Without one, the model is traced from the first batch it sees.
        **options: what the class takes, as ``lr``.

    Returns:
        A pair for ``Trainer(..., optimizer_cls_and_kwargs=...)`` of transformers 5.3 or newer.

    Example:
        >>> factory, options = trainer_optimizer(lr=0.02)
        >>> type(factory()(nn.Linear(2, 3), **options)).__name__  # as Trainer does
        'BalancedMuon'
    """
    return _Factory, {"optimizer_class": optimizer_class, "example_input": example_input, **options}


class _Factory:
    """A class that is no torch optimizer, which Trainer makes without arguments, and calls with the model."""

    def __call__(
        self, model: nn.Module, *, optimizer_class: Callable[..., Optimizer], **options: Any
    ) -> Optimizer:
        return optimizer_class(model, **options)
