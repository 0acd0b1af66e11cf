"""When gamma, and whatever else depends on the weights alone, is measured, kept and thrown away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pathsgd._torch import Version, is_capturing, is_compiling, uncompiled, versions
from pathsgd.geometry.devices import on_device
from pathsgd.geometry.edge_weights import Tensors
from pathsgd.geometry.gamma import Gamma, Gammas
from pathsgd.geometry.range_check import has_room, is_due
from pathsgd.geometry.sharded import local_part
from pathsgd.geometry.shared_weights import Shared
from pathsgd.graph.path_graph import PathGraph, unwrap
from pathsgd.graph.sharded import is_sharded
from pathsgd.graph.trace import Example
from pathsgd.optim.backward_start import BackwardStart
from pathsgd.optim.batch_counters import are_counted
from pathsgd.optim.capture_from_start import capture_after, capture_from_start, find_capture
from pathsgd.optim.captured_measurement import CapturedMeasurement
from pathsgd.optim.known_parameters import KnownParameters
from pathsgd.optim.lazy_graph import LazyGraph
from pathsgd.optim.measurement import F, GammaMeasurement, Measurement
from pathsgd.optim.model_tensors import ModelTensors
from pathsgd.optim.parameter_writes import ParameterWrites
from pathsgd.optim.replicas import Replicas

WARM_UP = 3
"""Measurements before gamma is captured in a CUDA graph."""


Key = tuple[Measurement[Any], float]


class GammaCache:
    """The gammas of one model: measured when a step first needs them, valid until weights are written."""

    def __init__(
        self,
        model: nn.Module,
        example_input: Example | PathGraph | None,
        batch_dim: int | None = 0,
        refresh_every: int = 1,
        shared: Shared = "kappa1",
        needs_paths: bool = True,
    ) -> None:
        if refresh_every < 1:
            raise ValueError(f"Invalid refresh_every value: {refresh_every}")
        self.model = unwrap(model)
        self.sharded = any(map(is_sharded, self.model.parameters()))
        self.replicas = Replicas(model, self.model)
        self.lazy_graph = LazyGraph(self.model, example_input, batch_dim, needs_paths)
        self.refresh_every = refresh_every
        self.gamma_measurement = GammaMeasurement(shared)
        self.known = KnownParameters(self.model)
        self._model_tensors = ModelTensors(self.model)
        self.needs_exponents: dict[Key, bool] = {}
        self._in_range: Counter[Key] = Counter()
        """How often in a row plain floats were enough."""
        self._found: dict[Key, Any] = {}
        self._versions: list[Version] = []
        self._captured: dict[Key, CapturedMeasurement[Any]] = {}
        self._ahead: dict[Key, list[Version]] = {}
        """What is being measured for the next step on a second stream, of tensors of these versions."""
        self._writes = ParameterWrites()
        self._found_statistics: tuple[int, list[str], bool] = 0, [], True
        self._compiled = None if uncompiled(model) is model else model
        self._backward_start: BackwardStart | None = None
        self._forward_done: tuple[torch.cuda.Event, int, list[Version]] | None = None
        """In a CUDA graph of the user's, where its forward pass ends, in which capture, and what there was
        then."""
        self._used: list[Key] = []
        """What the last step needed."""
        self._read: Tensors | None = None
        self._in_capture: dict[Key, Any] | None = None
        """What a step that is being captured has measured so far."""
        self._read_in_capture: list[Any] = []
        """What was measured in a capture, up to the end of a step: what is freed, the next measurement may
        overwrite, which does not wait for those who are still to read it, such as a norm to clip by."""
        self._measurements = 0
        self._steps = 0
        self._synchronised = False

    @property
    def names(self) -> dict[int, str]:
        """Of the model's Parameters, by id."""
        return self.known.names

    @property
    def graph(self) -> PathGraph:
        return self.lazy_graph.get()

    def gammas(self, p: float) -> Gammas:
        """gamma of every parameter of the model, measured now unless the cached one is still valid."""
        return self.get(self.gamma_measurement, p)

    def get(self, measurement: Measurement[F], p: float) -> F:
        """What is measured of the model as it is, now unless the cached one is still valid."""
        key = measurement, p
        capturing = is_capturing()
        if self._found and not capturing and not self._is_valid(self._find_versions(self.tensors())):
            self.refresh()
        if key not in self._found:
            if capturing:
                # A compiled or captured step cannot look at values, so it takes plain floats if they were
                # enough for the last step outside, with some room.
                if self._in_capture and key in self._in_capture:
                    return self._in_capture[key]
                tensors = self.tensors()
                graph = measurement.adapt(self.graph)
                with self._capturing(measurement, tensors):
                    found = measurement.run(graph, tensors, p, self.needs_exponents.get(key, False))
                if self._in_capture is not None:
                    self._in_capture[key] = found
                if not is_compiling():
                    self._read_in_capture.append(found)
                return found
            tensors = self.tensors()
            self.known.check_walk(self._model_tensors)
            self._versions = self._find_versions(tensors)
            with on_device(next(iter(tensors.values())).device):
                self._found[key] = self._measure(measurement, p, tensors)
            room = has_room(measurement.adapt(self.graph), p)
            self.needs_exponents[key] = self._found[key].exponents or not room
        return self._found[key]

    def gammas_of(self, parameters: Sequence[Tensor], p: float) -> list[Gamma | None]:
        """gamma of each of these parameters; None where it falls back to gamma = 1."""
        if not parameters:
            return []
        gammas = self.gammas(p)
        return [gammas[self.names[id(q)]] if self.is_normalised(q) else None for q in parameters]

    def is_normalised(self, parameter: Tensor) -> bool:
        """Whether a parameter is the model's and on paths, so that its gamma is taken."""
        name = self.names.get(id(parameter))
        return name is not None and self.graph.parameters[name].normalised

    def _measure(self, measurement: Measurement[F], p: float, tensors: Tensors) -> F:
        """On a GPU by a captured CUDA graph, once plain floats have been seen to be enough."""
        key = measurement, p
        captured = self._captured.pop(key, None)
        if captured is not None:
            begun = self._ahead.pop(key, None)
            ahead = None if begun is None else captured.finish()
            if begun == self._read_by(measurement, self._versions):
                found = ahead
            else:
                check = self._writes.are_unusual(self._of_parameters(self._versions))
                found = captured.replay(check) if captured.fits(tensors) else None
            if found is not None:
                self._captured[key] = captured
                return found
        graph = measurement.adapt(self.graph)
        found = measurement.run(graph, tensors, p, None if self._must_check(key, tensors) else False)
        self._in_range[key] = 0 if found.exponents else self._in_range[key] + 1
        self._measurements += 1
        on_gpu = not self.sharded and _are_on_gpu(tensors)
        if on_gpu and not self._reads_parameters_alone(measurement):
            self._backward_start = self._backward_start or BackwardStart(self, self._compiled)
            self._backward_start.watch(self.model.parameters())
        if on_gpu and self._measurements > WARM_UP and measurement.capturable and not found.exponents:
            self._captured[key] = CapturedMeasurement(graph, tensors, p, measurement.measure)
            self._measurements = 0  # weights that keep moving in memory are not captured every time
        return found

    def _must_check(self, key: Key, tensors: Tensors) -> bool:
        """Whether to look if plain floats are enough, for which the host waits for a GPU."""
        return (
            not _are_on_gpu(tensors)
            or not self._reads_parameters_alone(key[0])
            or not self._writes.are_of_step(self._of_parameters(self._versions))
            or self.needs_exponents.get(key, True)
            or is_due(self._in_range[key])
        )

    def tensors(self) -> Tensors:
        """What gamma is measured from."""
        self._read = self._model_tensors.read(self.graph)
        return self.replicas.take_statistics(self._read)

    def synchronise(self) -> None:
        """Makes gamma the same on all ranks that train the model together, up to the next step. A collective
        call."""
        if self.lazy_graph.is_known and self.replicas.synchronise(self.graph):
            self._synchronised = True
            if self._steps % self.refresh_every == 0:  # what one rank alone may have looked at in between
                self._clear()

    def before_step(self) -> None:
        """The same, unless gradients were clipped and it was done for that."""
        self._read = None
        self._in_capture = None if is_compiling() else {}
        if not self._synchronised:
            self.synchronise()
        self._synchronised = False

    def is_captured(self, p: float, measurement: Measurement[Any] | None = None) -> bool:
        """Whether gamma at this p, or what else is measured, is replayed from a CUDA graph."""
        return (measurement or self.gamma_measurement, p) in self._captured

    def calibrate(self, p: float) -> None:
        """Finds out whether plain floats are enough, for a step that is compiled before any is run."""
        if self.lazy_graph.graph is not None:
            self.gammas(p)
            self.refresh()

    def after_step(self) -> None:
        """A step has written the weights."""
        self._forward_done = self._in_capture = None
        if is_capturing():
            if not is_compiling():
                self._read_in_capture.clear()
            self._writes.forget()
            self._read = None
            return  # nothing was cached, and a count would make torch.compile recompile
        if not (self._found or self._captured or self._backward_start):  # all were carried by their chains
            self._writes.forget()
            self._read, self._used = None, []
            self._steps += 1
            return
        # Those that the step has read, if it has: none has been replaced since.
        tensors, self._read = self._read or self._model_tensors.read(self.graph), None
        now = self._find_versions(tensors, statistics=self.refresh_every > 1)
        before = self._of_parameters(self._versions) if self._found else None
        self._writes.after_step(before, self._of_parameters(now))
        if self._backward_start is not None:
            self._backward_start.after_step()
        self._steps += 1
        if self._steps % self.refresh_every == 0:
            self._used = list(self._found)
            self._measure_ahead(tensors, now, statistics=False)
            self._clear()
        elif self._found:
            self._versions = now

    def on_backward(self, last: bool) -> None:
        """A backward pass begins, and probably the last one before the step: unless the network is run once
        more, its running statistics will be those of the step."""
        if is_compiling() or self.refresh_every > 1 or not self._statistics()[1] or _has_other_ranks():
            return
        tensors = self._model_tensors.read(self.graph)
        if is_capturing():
            event = torch.cuda.Event()
            event.record()
            self._forward_done = event, find_capture(), self._find_versions(tensors)
        elif last:
            self._measure_ahead(tensors, self._find_versions(tensors), statistics=True)

    def _measure_ahead(self, tensors: Tensors, now: list[Version], *, statistics: bool) -> None:
        """Measures for the next step what the last one needed, with or without running statistics, while the
        network does something else."""
        for key in self._used:
            captured = self._captured.get(key)
            if captured is None or self._reads_parameters_alone(key[0]) == statistics:
                continue
            if captured.fits(tensors):
                with on_device(next(iter(tensors.values())).device):
                    captured.start(self._writes.are_unusual(self._of_parameters(now)))
                self._ahead[key] = self._read_by(key[0], now)

    def _reads_parameters_alone(self, measurement: Measurement[Any]) -> bool:
        return not measurement.reads_statistics or not self._statistics()[0]

    def _capturing(self, measurement: Measurement[Any], tensors: Tensors) -> AbstractContextManager[None]:
        """What is measured inside need not wait for what was captured before, but for what wrote weights and
        statistics."""
        device = next(iter(tensors.values())).device
        if is_compiling() or device.type != "cuda":
            return nullcontext()
        now = self._find_versions(tensors)
        if self._reads_parameters_alone(measurement) and self._writes.are_of_step(self._of_parameters(now)):
            return capture_from_start(device, self)
        if self._forward_done is not None and self._forward_done[1:] == (find_capture(), now):
            return capture_after(self._forward_done[0], device, self)
        return nullcontext()

    @torch.no_grad()
    def _find_versions(self, tensors: Tensors, statistics: bool = True) -> list[Version]:
        """Of parameters, then of running statistics."""
        names, _ = self._statistics()
        own = [tensors[name] for name in (*self.graph.parameters, *(names if statistics else ()))]
        return versions(map(local_part, own) if self.sharded else own)

    def _read_by(self, measurement: Measurement[Any], now: list[Version]) -> list[Version]:
        """The versions of what is measured."""
        return self._of_parameters(now) if self._reads_parameters_alone(measurement) else now

    def _of_parameters(self, now: list[Version]) -> list[Version]:
        return now[: len(self.graph.parameters)]

    def _is_valid(self, now: list[Version]) -> bool:
        # Running statistics change with every batch: they do not count where gamma may be some steps old.
        count = None if self.refresh_every == 1 else len(self.graph.parameters)
        return now[:count] == self._versions[:count]

    def _statistics(self) -> tuple[list[str], bool]:
        """The running statistics that gamma is measured from, and whether their versions show all writes."""
        walks, names, counted = self._found_statistics
        if walks != self._model_tensors.walks or not walks:
            tensors = self._model_tensors.read(self.graph)
            names = [name for name in tensors if name not in self.graph.parameters]
            counted = are_counted(self.model, names)
            self._found_statistics = self._model_tensors.walks, names, counted
        return names, counted

    def is_last_of_coordinates(self) -> bool:
        """Whether the step that is being taken is the last for what is cached."""
        return is_capturing() or (self._steps + 1) % self.refresh_every == 0

    def _clear(self) -> None:
        # The gammas of a captured measurement are written in place next time, their roots are not.
        for found in self._found.values():
            if isinstance(found, Gammas):
                found.forget_roots()
        self._found.clear()

    def refresh(self) -> None:
        """Throws away what is cached."""
        self._clear()
        self._ahead = {key: [] for key in self._ahead}
        self._writes.forget()

    def check_identity(self) -> None:
        """The model still has the Parameters it had."""
        self.known.check_model(self._model_tensors)

    def __getstate__(self) -> dict[str, Any]:
        gone = dict.fromkeys(("_backward_start", "_compiled", "_forward_done", "_read", "_in_capture"))
        return {
            **self.__dict__, **gone, "_found": {}, "_captured": {}, "_ahead": {}, "_used": [],
            "_read_in_capture": [],
            "_writes": ParameterWrites(),
            "_found_statistics": (0, [], True),
        }  # fmt: skip


def _has_other_ranks() -> bool:
    """Statistics are then those that ranks agree on in the step."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _are_on_gpu(tensors: Tensors) -> bool:
    return all(tensor.is_cuda for tensor in tensors.values())
