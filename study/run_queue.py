"""Training of many runs: each from its checkpoint to its end, several at a time on a CPU, none twice."""

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from pathsgd import PathError
from study.config import Run
from study.data import Dataset
from study.files import add_manifest, encode_line
from study.runs import Metrics, RunFolder, RunRecord, Status, describe, read_record
from study.training import LossAndError, Trainer, TrainingData, prepare_data, trace_network

HOPELESS = 0.9  # fraction of the error of guessing: a run that is not below it after its grace is stopped
SMALL_NETWORK = 1 << 20  # weights below which a network is trained no faster by several threads
MAX_CPU_LANES = 4


class Progress:
    """Prints the progress of long work, unless it is quiet. Override what you need.

    Runs that are trained at the same time call from threads of their own. An exception ends the work; what
    was recorded is resumed next time.
    """

    def __init__(self, quiet: bool = True, every_epoch: bool = False) -> None:
        self.quiet, self.every_epoch = quiet, every_epoch

    def start_phase(self, title: str, epochs: int) -> None:
        self.message(f"{title}: {epochs} epoch{'s at most' if epochs > 1 else ''}")

    def epoch(self, run: Run, metrics: Metrics) -> None:
        """Reports an epoch of a run; a resumed run reports the recorded ones again."""
        if self.every_epoch:
            self.message(encode_line(metrics).decode().strip())

    def run_ended(self, record: RunRecord) -> None:
        if not record.run.validation and not self.every_epoch:
            run = f"{describe(record.run)}, step size {record.run.step_size:g}, seed {record.run.seed.init}"
            self.message(f"{run}: {record.status}, test error {record.errors[-1]:.2%}")

    def message(self, text: str) -> None:
        if not self.quiet:
            print(text, flush=True)


@dataclass(frozen=True)
class RunQueue:
    out: Path
    datasets: Mapping[str, Dataset]
    device: torch.device
    lanes: int  # runs at a time
    progress: Progress
    checkpoint_seconds: float = 30.0
    keep_checkpoints: bool = False  # whether the last checkpoint stays when a run has ended

    def find_record(self, run: Run) -> RunRecord | None:
        """Returns the record of a run that has ended, cleaned up after a kill at its end."""
        folder = RunFolder(self.out / "runs", run)
        record = folder.find_record(self.keep_checkpoints)
        if record is not None:
            folder.clean_up(self.keep_checkpoints)
        elif folder.result.exists():
            self.progress.message(f"trained again, since its files are not as it left them: {run.name}")
        return record

    def train_all(self, title: str, runs: Sequence[Run]) -> dict[Run, RunRecord]:
        """Returns the records of these runs, trained where there is none yet."""
        records = {run: record for run in runs if (record := self.find_record(run)) is not None}
        missing = [run for run in runs if run not in records]
        if records:
            self.progress.message(f"{title}: {len(records)} of {len(runs)} done before")
        if not missing:
            return records
        self.progress.start_phase(title, sum(run.epochs for run in missing))
        add_manifest(self.out / "manifest.json", self.device)
        for run in missing:
            data = self.datasets[run.dataset]
            trace_network(data.features, *run.hidden, data.classes)  # not beside other runs: see there
        if self.lanes == 1:
            return records | {run: self._train(run, self.progress.epoch) for run in missing}
        return records | self._train_in_threads(missing)

    def _train_in_threads(self, runs: Sequence[Run]) -> dict[Run, RunRecord]:
        stopping = threading.Event()

        def on_epoch(run: Run, metrics: Metrics) -> None:
            if stopping.is_set():
                raise KeyboardInterrupt
            self.progress.epoch(run, metrics)

        with ThreadPoolExecutor(self.lanes) as pool:
            try:
                return dict(zip(runs, pool.map(lambda run: self._train(run, on_epoch), runs), strict=True))
            except BaseException:
                stopping.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _train(self, run: Run, on_epoch: Callable[[Run, Metrics], None]) -> RunRecord:
        folder, data = RunFolder(self.out / "runs", run), self.datasets[run.dataset]
        prepared, seconds = prepare_data(data, run, self.device), self.checkpoint_seconds
        record = train_run(run, prepared, folder, on_epoch, seconds, self.keep_checkpoints)
        self.progress.run_ended(record)
        return record


def train_run(
    run: Run, data: TrainingData, folder: RunFolder, on_epoch: Callable[[Run, Metrics], None],
    checkpoint_seconds: float, keep_checkpoint: bool = False,
) -> RunRecord:  # fmt: skip
    """Trains from the start, or from the checkpoint, to the end. An interruption changes no number."""
    if data.train_x.is_cuda:
        torch.backends.cuda.matmul.allow_tf32 = run.tf32
    start = time.monotonic()
    trainer = Trainer(run, data)
    saved = folder.load()
    if saved is None:
        lines = [_metrics(run, 0, trainer.evaluate(data.train_x, data.train_y), trainer)]
    else:
        state, lines = saved
        trainer.load_state_dict(state)
    folder.begin(lines)
    for line in lines:
        on_epoch(run, line)
    saved_at = time.monotonic()
    status, reason = _judge(run, lines, data.classes)
    while status is None:
        lines.append(_metrics(run, len(lines), trainer.train_epoch(), trainer))
        folder.add_line(lines[-1])
        on_epoch(run, lines[-1])
        status, reason = _judge(run, lines, data.classes)
        due = time.monotonic() - saved_at >= checkpoint_seconds
        if due or (status is not None and keep_checkpoint):
            folder.save(lines, trainer.state_dict())
            saved_at = time.monotonic()
    folder.end(status, reason, time.monotonic() - start, keep_checkpoint)
    return read_record(folder.path)


def _metrics(run: Run, epoch: int, trained: LossAndError, trainer: Trainer) -> Metrics:
    evaluated = trainer.evaluate(trainer.data.evaluated_x, trainer.data.evaluated_y)
    return {
        "epoch": epoch, "train_loss": trained.loss, "train_error": trained.error,
        f"{run.evaluates_on}_loss": evaluated.loss, f"{run.evaluates_on}_error": evaluated.error,
    }  # fmt: skip


def _judge(run: Run, lines: list[Metrics], classes: int) -> tuple[Status | None, str]:
    epoch, last = len(lines) - 1, lines[-1]
    losses = [last["train_loss"], last[f"{run.evaluates_on}_loss"]]
    if any(loss is None or not math.isfinite(loss) for loss in losses):
        return "diverged", f"the loss was not finite in epoch {epoch}"
    if run.grace and epoch == run.grace < run.epochs:
        best = min(line[f"{run.evaluates_on}_error"] for line in lines[1:])
        guessing = 1 - 1 / classes
        if best >= HOPELESS * guessing:
            reason = f"an error of {best:.1%} after {epoch} epochs, where guessing has {guessing:.1%}"
            return "stopped", reason
    return ("done", "") if epoch >= run.epochs else (None, "")


def find_device(name: str | None) -> torch.device:
    """Returns the device of this name; without a name a GPU if there is one."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
    except Exception as error:  # whatever a backend that is not there raises
        raise PathError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return device


def choose_lanes(device: torch.device, weights: int, lanes: int | None) -> int:
    """Sets torch's threads for networks of this many weights; returns the number of runs at a time.

    On a CPU small networks are run with one thread each, several at a time, and large ones with all threads,
    one at a time. The number of threads depends on nothing else: it may change the last bits of a sum.
    """
    if lanes is not None and not 1 <= lanes <= (1 if device.type == "cuda" else 16):
        raise PathError(f"Invalid number of lanes: {lanes} (1 to 16 on a CPU, 1 on a GPU)")
    if device.type == "cuda" or weights >= SMALL_NETWORK:
        return lanes or 1
    torch.set_num_threads(1)
    sys.setswitchinterval(5e-4)  # a step is shorter than the 5 ms that Python takes otherwise
    return lanes or min(os.cpu_count() or 1, MAX_CPU_LANES)
