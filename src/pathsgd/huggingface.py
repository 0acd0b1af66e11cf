"""The optimizers for Hugging Face's Trainer, which makes its optimizer by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from pathsgd import Inputs, PathGraph, PathMuon


def trainer_optimizer(
    optimizer_class: Callable[..., Optimizer] = PathMuon,
    example_input: Any | Inputs | PathGraph | None = None,
    **options: Any,
) -> tuple[type[_Factory], dict[str, Any]]:
    """What ``Trainer`` takes as ``optimizer_cls_and_kwargs``.

    A class of torch there is called with parameters, which do not say what their paths are. What is returned
    here is called with the model: after it was put on its device, once for each trial of a
    hyperparameter search, and with FSDP, where ``Trainer`` refuses an optimizer that exists already.

    ``learning_rate`` and ``weight_decay`` of ``TrainingArguments`` are for the optimizers of ``Trainer``'s own
    list and have no effect: name both here. Its schedule, by default linear to zero, acts on ``lr``.

    Args:
        optimizer_class: :class:`pathsgd.PathMuon`, :class:`pathsgd.PathAdam`, :class:`pathsgd.PathSGD` or
            :class:`pathsgd.PathAdagrad`.
        example_input: as these take it. Without one, the model is traced from the first batch it sees.
        **options: what the class takes, as ``lr``.

    Returns:
        A pair for ``Trainer(..., optimizer_cls_and_kwargs=...)`` of transformers 5.3 or newer.

    Example:
        >>> make, options = trainer_optimizer(lr=0.02)
        >>> type(make()(nn.Linear(2, 3), **options)).__name__  # as Trainer does
        'PathMuon'
    """
    return _Factory, {"optimizer_class": optimizer_class, "example_input": example_input, **options}


class _Factory:
    """Trainer makes one of these and calls it with the model, as everything that is no torch optimizer."""

    def __call__(self, model: nn.Module, *, optimizer_class: Callable[..., Optimizer], **options: Any) -> Any:
        return optimizer_class(model, **options)
