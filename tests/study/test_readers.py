"""Data sets: small files in the original formats are read exactly, and bad ones end in one line."""

import gzip
import io
import struct
import sys
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch

from pathsgd import PathError
from study import sources
from study.__main__ import main
from study.data import Dataset
from study.sources import SOURCES, load
from support.data_files import RNG, idx, pixels, refused, write_cifar, write_mnist, write_svhn


@pytest.fixture
def mnist(tmp_path):
    return write_mnist(tmp_path)


def test_mnist_gzipped_and_not_in_any_layout(mnist, tmp_path):
    raw, arrays = mnist
    for place in ("MNIST/raw", "mnist", "."):
        folder = tmp_path / place
        folder.mkdir(exist_ok=True)
        for path in sorted(raw.iterdir()) if folder != raw else []:
            path.rename(folder / path.name)
        raw = folder
        data = load("mnist", tmp_path, download=False)
        assert (data.shape, data.features, data.classes) == ((1, 28, 28), 784, 10)
        assert data.train_x.dtype == torch.uint8
        assert np.array_equal(data.train_x.numpy(), arrays["train"][0].reshape(7, 784))
        x, y = data.scaled(data.test_x), data.test_y
        assert torch.equal(x, torch.tensor(arrays["t10k"][0].reshape(3, 784)).float() / 255)
        assert y.tolist() == arrays["t10k"][1].tolist()
    for path in tmp_path.glob("*.gz"):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    assert torch.equal(load("mnist", tmp_path, download=False).train_x, data.train_x)


MNIST_FAULTS = {
    "empty": (b"", "ends within its header, after 0 of 16 bytes"),
    "cut gzip": (gzip.compress(idx(pixels(7, 28, 28)))[:-40], "cannot be read to its end"),
    "altered gzip": (b"\x1f\x8b" + bytes(100), "cannot be read to its end"),
    "no idx": (gzip.compress(b"<html>" + bytes(20)), "starts with 0x3c68746d, expected 0x00000803"),
    "cut": (idx(pixels(7, 28, 28))[:-1], "promises 7 examples of 5488 bytes and holds 5487"),
    "too long": (gzip.compress(idx(pixels(7, 28, 28)) + b"x"), "of 5488 bytes and holds 5489"),
    "other size": (idx(pixels(7, 20, 20)), "images of 20x20 pixels, expected 28x28"),
    "none": (idx(pixels(0, 28, 28)), "promises 0 examples"),
    "claims": (struct.pack(">4I", 0x803, 2**32 - 1, 28, 28), "promises 4294967295 examples"),
    "bomb": (gzip.compress(struct.pack(">4I", 0x803, 7, 28, 28) + bytes(1 << 26)), "holds 67108864"),
    "other count": (idx(pixels(6, 28, 28)), "has 6 images and train-labels-idx1-ubyte.gz 7 labels"),
}


@pytest.mark.parametrize("fault", MNIST_FAULTS)
def test_bad_mnist(mnist, tmp_path, fault):
    path = mnist[0] / "train-images-idx3-ubyte.gz"
    content, message = MNIST_FAULTS[fault]
    path.write_bytes(content)
    refused("mnist", tmp_path, path, message)
    assert path.read_bytes() == content


def test_bad_mnist_labels_and_missing_files(mnist, tmp_path):
    raw, _ = mnist
    path = raw / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(idx(np.array([0, 10, 3], np.uint8)))
    refused("mnist", tmp_path, path, "labels from 0 to 10, expected 0 to 9")
    path.unlink()
    refused("mnist", tmp_path, raw, "lacks t10k-labels-idx1-ubyte.gz", "python -m study data mnist")
    path.mkdir()
    refused("mnist", tmp_path, "lacks t10k-labels-idx1-ubyte.gz")
    refused("mnist", tmp_path / "nowhere", "MNIST is not in", "MNIST/raw, MNIST, mnist/raw, mnist, .")


def test_cifar(tmp_path):
    source = SOURCES["cifar10"]
    written = write_cifar(tmp_path / source.folders[0], source.train_files + source.test_files, [10])
    data = load("cifar10", tmp_path, download=False)
    assert (data.shape, data.classes, len(data.train_y), len(data.test_y)) == ((3, 32, 32), 10, 25, 5)
    assert np.array_equal(data.train_x[10:15].numpy(), written["data_batch_3.bin"][0])
    assert data.test_y.tolist() == written["test_batch.bin"][1].tolist()
    written = write_cifar(tmp_path / "cifar-100-binary", ("train.bin", "test.bin"), [20, 100])
    data = load("cifar100", tmp_path, download=False)
    assert (data.classes, data.train_y.tolist()) == (100, written["train.bin"][1].tolist())
    assert np.array_equal(data.test_x.numpy(), written["test.bin"][0])


def test_bad_cifar(tmp_path):
    folder = tmp_path / "cifar-100-binary"
    write_cifar(folder, ("train.bin", "test.bin"), [20, 100])
    path = folder / "test.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    refused("cifar100", tmp_path, path, "has 15369 bytes", "records of 3074 (3073 are left over)")
    path.write_bytes(b"")
    refused("cifar100", tmp_path, path, "has 0 bytes")
    path.write_bytes(b"\x14" + whole[1:])
    refused("cifar100", tmp_path, path, "to 20, expected 0 to 19")
    path.write_bytes(whole[:1] + b"\x64" + whole[2:])
    refused("cifar100", tmp_path, path, "to 100, expected 0 to 99")


@pytest.mark.parametrize("compress", [True, False])
def test_svhn(tmp_path, compress):
    written = write_svhn(tmp_path / "svhn", compress=compress)
    data = load("svhn", tmp_path, download=False)
    assert data.train_y.tolist() == [5, 6, 7, 8, 9, 0]
    for image in range(6):
        planes = written["test"][0][:, :, :, image].transpose(2, 0, 1)
        assert np.array_equal(data.test_x[image].view(3, 32, 32).numpy(), planes)


def test_bad_svhn(tmp_path):
    folder = tmp_path / "SVHN"
    for changed, message in (
        ({"y": np.full((6, 1), 11, np.uint8)}, "labels from 11 to 11, expected 1 to 10"),
        ({"y": np.full((6, 1), 1.5)}, "y (6, 1) of float64"),
        ({"y": np.array([["a", {}]], object)}, "y (1, 2) of object"),
        ({"y": np.ones((5, 1), np.uint8)}, "y (5, 1) of uint8"),
        ({"X": pixels(32, 32, 6)}, "X (32, 32, 6) of uint8"),
        ({"X": np.ones((32, 32, 3, 6))}, "X (32, 32, 3, 6) of float64"),
    ):
        write_svhn(folder, **changed)
        refused("svhn", tmp_path, folder / "train_32x32.mat", message)
    path = folder / "train_32x32.mat"
    write_svhn(folder)
    whole = path.read_bytes()
    for content in (b"", b"<html>" * 50, whole[:-1], whole[:300] + bytes(100) + whole[400:]):
        path.write_bytes(content)
        refused("svhn", tmp_path, path, "no sound MATLAB 5 file")
    path.write_bytes(whole[:128])
    refused("svhn", tmp_path, path, "has X (0,)")


def test_digits():
    data = load("digits")
    assert (data.shape, data.classes, len(data.train_y), len(data.test_y)) == ((1, 8, 8), 10, 1442, 355)
    x, y = data.scaled(data.train_x), data.train_y
    assert (float(x.min()), float(x.max()), x.dtype) == (0.0, 1.0, torch.float32)
    assert (y.bincount() / data.test_y.bincount() - 4).abs().max() < 0.15
    assert torch.equal(load("digits").test_x, data.test_x)


def test_npz(tmp_path):
    path = tmp_path / "own.npz"
    arrays = {
        "train_x": pixels(4, 5, 6),
        "train_y": np.arange(4),
        "test_x": pixels(2, 5, 6),
        "test_y": [3, 1],
    }
    np.savez_compressed(path, **arrays)
    data = load(f"own={path}")
    assert (data.name, data.shape, data.features, data.classes) == ("own", (1, 5, 6), 30, 4)
    assert np.allclose(data.scaled(data.train_x).numpy(), arrays["train_x"].reshape(4, 30) / 255)
    floats = {name: RNG.normal(size=(len(arrays[name]), 3)) for name in ("train_x", "test_x")}
    np.savez(path, **{**arrays, **floats})
    data = load(f"own={path}")
    assert data.shape == (3,)
    assert np.array_equal(data.scaled(data.test_x).numpy(), floats["test_x"].astype(np.float32))


class Trap:
    """Unpickling it would end the test."""

    def __reduce__(self):
        return sys.exit, ("code from a file was run",)


NPZ_FAULTS = {
    "trap": ({"train_x": np.array([Trap()], object)}, "Object arrays cannot be loaded"),
    "text": ({"train_x": np.array([["a"]])}, "train_x (1, 1) of <U1"),
    "nan": ({"train_x": np.array([[1.0, np.nan]] * 4)}, "not finite"),
    "too large": ({"train_x": np.array([[1e300]] * 4)}, "not finite"),
    "ints": ({"train_x": np.ones((4, 3), int)}, "int64, expected uint8 or floats"),
    "flat": ({"train_x": np.ones(4)}, "train_x (4,) of float64, expected uint8"),
    "counts": ({"train_y": np.arange(3)}, "own: train has inputs (4, 3) and labels (3,)"),
    "negative": ({"test_y": np.array([0, -1])}, "test_y from -1 to 0"),
    "huge label": ({"test_y": np.array([0, 2**63], np.uint64)}, "test_y from 0 to 9223372036854775808"),
    "float labels": ({"test_y": np.ones(2)}, "of float64, expected (n,) of an integer type"),
    "other shape": ({"test_x": pixels(2, 4)}, "save both with one shape"),
    "no examples": ({"test_x": pixels(0, 3)}, "test_x (0, 3)"),
    "one class": ({"train_y": np.zeros(4, int), "test_y": np.zeros(2, int)}, "has one class in its training"),
    "new label": ({"test_y": np.array([0, 7])}, "has test labels that no training example has: 7"),
    "overflow": (
        {"train_x": np.full((4, 3), 1e30), "test_x": np.ones((2, 3))},
        "as large as 1e+30, whose squares",
    ),
}


@pytest.mark.parametrize("fault", NPZ_FAULTS)
def test_bad_npz(tmp_path, fault):
    path = tmp_path / "own.npz"
    changed, message = NPZ_FAULTS[fault]
    sound = {"train_x": pixels(4, 3), "train_y": np.arange(4), "test_x": pixels(2, 3), "test_y": np.arange(2)}
    np.savez(path, **{**sound, **changed})
    refused(f"own={path}", None, "own", message)


def test_broken_npz(tmp_path):
    path = tmp_path / "own.npz"
    refused(f"own={path}", None, f"{path} is not a file")
    refused(f"../own={path}", None, "cannot name a data set")
    path.write_bytes(b"PK\x03\x04 and no more")
    refused(f"own={path}", None, path, "no sound npz file")
    np.savez(path, train_x=pixels(2, 2))
    refused(f"own={path}", None, path, "lacks train_y, test_x, test_y")
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        head, {"descr": "|u1", "fortran_order": False, "shape": (10**12, 784)}
    )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("train_x", "train_y", "test_x", "test_y"):
            archive.writestr(f"{name}.npy", head.getvalue() + bytes(1 << 16))
    refused(f"own={path}", None, path, "no sound npz file")


def test_a_data_set_is_sound():
    x, y = torch.zeros(2, 4, dtype=torch.uint8), torch.tensor([0, 1])
    assert Dataset("a", (1, 2, 2), 2, x, y, x, y).features == 4
    for wrong in (
        {"test_y": y[:1]},
        {"classes": 1},
        {"shape": (5,)},
        {"train_x": x.double()},
        {"test_y": -y},
    ):
        with pytest.raises(PathError, match=r"^a: (train|test) "):
            replace(Dataset("a", (4,), 2, x, y, x, y), **wrong)


def test_where_data_is_looked_for(mnist, tmp_path, monkeypatch):
    monkeypatch.setenv("PATHSGD_DATA", str(tmp_path))
    assert len(load("mnist", download=False).train_y) == 7
    monkeypatch.delenv("PATHSGD_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sources.default_data_dir() == tmp_path / ".cache/pathsgd/data"
    refused("imagenet", None, "no data set is called 'imagenet'", "NAME=FILE.npz")


def test_the_command(mnist, tmp_path, capsys):
    own = tmp_path / "own.npz"
    np.savez(own, train_x=pixels(4, 90), train_y=np.arange(4), test_x=pixels(2, 90), test_y=np.arange(2))
    assert main(["data", "--data-dir", str(tmp_path)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "data set"
    assert lines[0].split("  ")[:2] == ["MNIST, a part of the original", "784 (28x28 grey)"]
    assert lines[1].split() == ["digits", "64", "(8x8", "grey)", "10", "1442", "355"]
    assert [line.split(" is not in ")[0] for line in lines[2:]] == ["CIFAR-10", "CIFAR-100", "SVHN"]
    names = ["mnist", "svhn", f"own={own}", "mnist"]
    assert main(["data", *names, "--no-download", "--data-dir", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert [line.split("  ")[0] for line in printed.out.splitlines()[1:]] == [
        "MNIST, a part of the original",
        "own",
    ]
    assert printed.err.startswith("study: SVHN is not in ")
    assert printed.err.count("\n") == 1
    with pytest.raises(SystemExit):
        main(["data", "--help"])
    assert "NAME=FILE.npz is your own" in capsys.readouterr().out
