"""Every example runs as it stands, and trains."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

BOUNDS = {
    "plain_loop": 0.2,
    "lightning_module": 0.4,
    "accelerate_loop": 0.3,
    "hf_trainer": 2.8,
    "torchtitan_style": 2.6,
    "peft_lora": 2.74,
}
"""The loss that PathMuon has to get below: untrained it is 2.3 for digits, 5.5 for text, 2.76 before LoRA."""


def run_example(name, folder):
    """The losses that an example prints, by their names."""
    launcher = TORCHRUN if name == "torchtitan_style" else []
    process = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / f"{name}.py")],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    last = process.stdout.strip().splitlines()[-1]
    return {key: float(loss) for key, loss in re.findall(r"(\w+) (\d+\.\d+)", last)}


def test_every_example_is_here():
    assert {file.stem for file in EXAMPLES.glob("*.py")} == BOUNDS.keys()


def check_it_trains(name, folder):
    losses = run_example(name, folder)
    assert losses["PathMuon"] < BOUNDS[name]
    assert losses["AdamW"] > 0  # it is there to compare with
    assert list(folder.iterdir()) == []
    return losses


def test_plain_loop(tmp_path):
    check_it_trains("plain_loop", tmp_path)


def test_lightning(tmp_path):
    check_it_trains("lightning_module", tmp_path)


def test_hugging_face_trainer(tmp_path):
    check_it_trains("hf_trainer", tmp_path)


def test_accelerate(tmp_path):
    check_it_trains("accelerate_loop", tmp_path)


def test_peft(tmp_path):
    losses = check_it_trains("peft_lora", tmp_path)
    assert losses["PathMuon"] < losses["before"] - 0.04


def test_fsdp2_by_torchrun(tmp_path):
    check_it_trains("torchtitan_style", tmp_path)
