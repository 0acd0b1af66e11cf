"""Data sets: small files in the original formats are read exactly, and bad ones end in one line."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import struct
import sys
import tarfile
import threading
import zipfile
import zlib
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.io
import torch
from filelock import FileLock

from pathsgd.errors import PathError
from pathsgd.paper import cli
from pathsgd.paper.data import download, npz, svhn, unpack
from pathsgd.paper.data import load as loading
from pathsgd.paper.data.dataset import Dataset
from pathsgd.paper.data.load import load
from pathsgd.paper.data.sources import SOURCES, Remote

RNG = np.random.default_rng(0)


def pixels(n, *shape):
    return RNG.integers(0, 256, (n, *shape), dtype=np.uint8)


def idx(array):
    return struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.tobytes()


def refused(name, data_dir, *parts, **options):
    """The one line that a data set is refused with, which has to hold all these parts."""
    with pytest.raises(PathError) as caught:
        load(name, data_dir, **{"download": False, **options})
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message
    return message


def left_over(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.name != ".lock")


@pytest.fixture
def mnist(tmp_path):
    """7 + 3 images in MNIST/raw, and what is in them."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    arrays = {"train": (pixels(7, 28, 28), pixels(7) % 10), "t10k": (pixels(3, 28, 28), pixels(3) % 10)}
    for split, (x, y) in arrays.items():
        (raw / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(x)))
        (raw / f"{split}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(y)))
    return raw, arrays


def write_cifar(folder, files, classes):
    """5 records in each file; gives back the last of its label bytes and the pixels."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for name in files:
        labels = np.stack([pixels(5) % count for count in classes], axis=1)
        x = pixels(5, 3072)
        (folder / name).write_bytes(np.concatenate([labels, x], axis=1).tobytes())
        written[name] = (x, labels[:, -1])
    return written


def write_svhn(folder, n=6, compress=True, **changed):
    folder.mkdir(exist_ok=True)
    written = {}
    for split in ("train", "test"):
        x, y = pixels(32, 32, 3, n), np.arange(1, n + 1, dtype=np.uint8)[:, None] + (10 - n)
        arrays = {"X": x, "y": y, **changed}
        scipy.io.savemat(folder / f"{split}_32x32.mat", arrays, do_compression=compress)
        written[split] = (x, y)
    return written


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
        x, y = data.test()
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
    "cut": (idx(pixels(7, 28, 28))[:-1], "promises 7 examples of 5488 bytes and holds only 5487"),
    "too long": (gzip.compress(idx(pixels(7, 28, 28)) + b"x"), "of 5488 bytes and holds more"),
    "other size": (idx(pixels(7, 20, 20)), "images of 20x20 pixels, expected 28x28"),
    "none": (idx(pixels(0, 28, 28)), "claims to hold 0 examples"),
    "claims": (struct.pack(">4I", 0x803, 2**32 - 1, 28, 28), "claims to hold 4294967295 examples"),
    "bomb": (gzip.compress(struct.pack(">4I", 0x803, 7, 28, 28) + bytes(1 << 26)), "holds more"),
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
    refused("mnist", tmp_path, raw, "lacks t10k-labels-idx1-ubyte.gz", "pathsgd data mnist")
    path.mkdir()
    refused("mnist", tmp_path, "lacks t10k-labels-idx1-ubyte.gz")
    refused("mnist", tmp_path / "nowhere", "MNIST is not in", "MNIST/raw, MNIST, mnist/raw, mnist, .")


def test_cifar(tmp_path):
    source = SOURCES["cifar10"]
    written = write_cifar(tmp_path / source.folders[0], source.files, [10])
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
    refused("cifar100", tmp_path, path, "has 15369 bytes", "records of 3074 bytes (3073 are left over)")
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


def test_bad_svhn(tmp_path, monkeypatch):
    folder = tmp_path / "SVHN"
    for changed, message in (
        ({"y": np.full((6, 1), 11, np.uint8)}, "labels from 11 to 11, expected 1 to 10"),
        ({"y": np.full((6, 1), 1.5)}, "not whole numbers"),
        ({"y": np.array([["a", {}]], object)}, "expected (32, 32, 3, n) of uint8 and (n, 1) numbers"),
        ({"y": np.ones((5, 1), np.uint8)}, "y (5, 1) of uint8"),
        ({"X": pixels(32, 32, 6)}, "X (32, 32, 6) of uint8"),
        ({"X": np.ones((32, 32, 3, 6))}, "X (32, 32, 3, 6) of double"),
    ):
        write_svhn(folder, **changed)
        refused("svhn", tmp_path, folder / "train_32x32.mat", message)
    path = folder / "train_32x32.mat"
    write_svhn(folder)
    whole = path.read_bytes()
    for content, message in (
        (b"", "no such header"),
        (b"<html>" * 50, "no such header"),
        (whole[:-1], "within an element"),
        (whole[:300] + bytes(100) + whole[400:], "cannot be read to its end"),
        (whole[:128], "X () of missing and y () of missing"),
    ):
        path.write_bytes(content)
        refused("svhn", tmp_path, path, message)
    bomb = zlib.compress(bytes(1 << 24))
    path.write_bytes(whole + struct.pack("<II", 15, len(bomb)) + bomb)
    monkeypatch.setattr(svhn, "INFLATED", 1 << 20)
    refused("svhn", tmp_path, path, "inflates to more than 1048576 bytes")


def test_digits():
    data = load("digits")
    assert (data.shape, data.classes, len(data.train_y), len(data.test_y)) == ((1, 8, 8), 10, 1442, 355)
    x, y = data.train()
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
    assert np.allclose(data.train()[0].numpy(), arrays["train_x"].reshape(4, 30) / 255)
    floats = {name: RNG.normal(size=(len(arrays[name]), 3)) for name in ("train_x", "test_x")}
    np.savez(path, **{**arrays, **floats})
    data = load(f"own={path}")
    assert data.shape == (3,)
    assert np.array_equal(data.test()[0].numpy(), floats["test_x"].astype(np.float32))


class Trap:
    """Unpickling it would end the test."""

    def __reduce__(self):
        return sys.exit, ("code from a file was run",)


NPZ_FAULTS = {
    "trap": ({"train_x": np.array([Trap()], object)}, "train_x of type object"),
    "text": ({"train_x": np.array([["a"]])}, "train_x of type <U1"),
    "nan": ({"train_x": np.array([[1.0, np.nan]] * 4)}, "not finite"),
    "too large": ({"train_x": np.array([[1e300]] * 4)}, "not finite"),
    "ints": ({"train_x": np.ones((4, 3), int)}, "int64, expected uint8 or floats"),
    "flat": ({"train_x": np.ones(4)}, "train_x (4,), expected (n, features)"),
    "counts": ({"train_y": np.arange(3)}, "4 inputs in train_x and 3 labels in train_y"),
    "negative": ({"test_y": np.array([0, -1])}, "test_y from -1 to 0"),
    "huge label": ({"test_y": np.array([0, 2**63], np.uint64)}, "test_y from 0 to 9223372036854775808"),
    "float labels": ({"test_y": np.ones(2)}, "of float64, expected (n,) of an integer type"),
    "other shape": ({"test_x": pixels(2, 4)}, "save both with one shape"),
    "no examples": ({"test_x": pixels(0, 3)}, "test_x (0, 3)"),
}


@pytest.mark.parametrize("fault", NPZ_FAULTS)
def test_bad_npz(tmp_path, fault):
    path = tmp_path / "own.npz"
    changed, message = NPZ_FAULTS[fault]
    sound = {"train_x": pixels(4, 3), "train_y": np.arange(4), "test_x": pixels(2, 3), "test_y": np.arange(2)}
    np.savez(path, **{**sound, **changed})
    refused(f"own={path}", None, path, message)


def test_broken_npz(tmp_path, monkeypatch):
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
        for name in npz.NAMES:
            archive.writestr(f"{name}.npy", head.getvalue() + bytes(1 << 16))
    refused(f"own={path}", None, path, "784000000000000 bytes and holds 65536")
    monkeypatch.setattr(npz, "LARGEST", 1 << 16)
    refused(f"own={path}", None, path, "expected at most 65536")


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


@pytest.fixture
def server(monkeypatch):
    """Serves ``content`` by path. ``cuts`` has the bytes after which the next answers break off."""
    state = SimpleNamespace(content={}, cuts=[], ranges=True, lengths=True, asked=[], status=[])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked = self.headers.get("Range")
            state.asked.append(asked)
            whole = state.content.get(self.path)
            if state.status or whole is None:
                self.send_error(state.status.pop(0) if state.status else 404)
                return
            start = int(asked[6:-1]) if asked and state.ranges else 0
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(whole) - 1}/{len(whole)}")
            if state.lengths:
                self.send_header("Content-Length", str(len(whole) - start))
            self.end_headers()
            end = start + state.cuts.pop(0) if state.cuts else len(whole)
            self.wfile.write(whole[start:end])

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        state.url = f"http://127.0.0.1:{http.server_port}/"
        monkeypatch.setattr(download, "PAUSE", 0.0)
        yield state
        http.shutdown()
        thread.join()


def serve(server, monkeypatch, name, files):
    """Makes the data set come from the server: these files, or one archive of them."""
    server.content = {f"/{file}": content for file, content in files.items()}
    remotes = tuple(
        Remote(server.url + file, len(content), hashlib.sha256(content).hexdigest())
        for file, content in files.items()
    )
    monkeypatch.setitem(SOURCES, name, replace(SOURCES[name], remotes=remotes))


@pytest.fixture
def served(server, mnist, tmp_path, monkeypatch):
    """MNIST on the server, and an empty folder to download it to."""
    raw, arrays = mnist
    serve(server, monkeypatch, "mnist", {path.name: path.read_bytes() for path in sorted(raw.iterdir())})
    return server, tmp_path / "new" / "data", arrays


def test_download_once(served, capsys):
    server, folder, arrays = served
    data = load("mnist", folder)
    assert np.array_equal(data.train_x.numpy(), arrays["train"][0].reshape(7, 784))
    assert len(server.asked) == 4
    assert "downloading http://127.0.0.1" in capsys.readouterr().err
    assert left_over(folder) == sorted(SOURCES["mnist"].files)
    own = folder / "MNIST/raw/train-labels-idx1-ubyte.gz"
    own.write_bytes(gzip.decompress(own.read_bytes()))  # sound, but not the original's bytes
    kept = own.read_bytes()
    (folder / "MNIST/raw/t10k-labels-idx1-ubyte.gz").unlink()
    load("mnist", folder)
    load("mnist", folder)
    assert len(server.asked) == 5
    assert own.read_bytes() == kept


@pytest.mark.parametrize("ranges", [True, False])
def test_a_cut_download_goes_on(served, ranges):
    server, folder, _ = served
    server.ranges = ranges
    server.cuts = [100, 50] if ranges else [100]
    load("mnist", folder)
    assert server.asked[:3] == ([None, "bytes=100-", "bytes=150-"] if ranges else [None, "bytes=100-", None])
    assert left_over(folder) == sorted(SOURCES["mnist"].files)


def test_a_cut_download_goes_on_in_the_next_run(served, monkeypatch):
    server, folder, _ = served
    first = min(SOURCES["mnist"].files)
    monkeypatch.setattr(download, "ATTEMPTS", 1)
    server.cuts = [100]
    refused("mnist", folder, server.url + first, "gave 100 of", "run again", download=True)
    assert left_over(folder) == [f"{first}.part"]
    refused("mnist", folder, "MNIST is not in")
    load("mnist", folder)
    assert server.asked[:2] == [None, "bytes=100-"]
    assert left_over(folder) == sorted(SOURCES["mnist"].files)


def test_servers_that_have_something_else(served):
    server, folder, _ = served
    first = min(SOURCES["mnist"].files)
    path = f"/{first}"
    whole = server.content.pop(path)
    refused("mnist", folder, server.url + first, "HTTP 404 Not Found", folder, download=True)
    server.content[path] = whole[:-1]
    refused("mnist", folder, f"has {len(whole) - 1} bytes, expected {len(whole)}", download=True)
    server.content[path] = bytes([whole[0] ^ 1]) + whole[1:]
    refused("mnist", folder, "sha256 is not", "deleted", download=True)
    assert left_over(folder) == []
    raw = folder / "MNIST" / "raw"
    (raw / f"{first}.part").write_bytes(whole + b"too long")
    server.content[path] = whole
    server.asked.clear()
    server.status = [503]
    load("mnist", folder)
    assert server.asked[:3] == [None, None, None]
    (raw / first).rename(raw / f"{first}.part")
    server.content[path] = whole + b"x"
    with (raw / f"{first}.part").open("r+b") as part:
        part.truncate(10)
    refused("mnist", folder, f"bytes '10-{len(whole)}/{len(whole) + 1}'", "start anew", download=True)
    assert f"{first}.part" not in left_over(folder)


def test_no_more_is_stored_than_the_original_has(served):
    server, folder, _ = served
    server.lengths = False
    wholes = dict(server.content)
    server.content = {path: whole + bytes(1 << 22) for path, whole in wholes.items()}
    load("mnist", folder)
    for path, whole in wholes.items():
        assert (folder / "MNIST" / "raw" / path[1:]).read_bytes() == whole


def test_no_server_and_no_folder(served, tmp_path, monkeypatch):
    _, folder, _ = served
    remotes = tuple(replace(r, url="http://127.0.0.1:9/" + r.name) for r in SOURCES["mnist"].remotes)
    monkeypatch.setitem(SOURCES, "mnist", replace(SOURCES["mnist"], remotes=remotes))
    refused("mnist", folder, "gave 0 of", "Connection refused", download=True)
    assert left_over(folder) == []
    (tmp_path / "file").write_text("")
    refused("mnist", tmp_path / "file", "cannot be written to", "--data-dir", download=True)


def test_one_process_at_a_time(served, monkeypatch):
    server, folder, _ = served
    folder.mkdir(parents=True)
    held, said = FileLock(folder / ".lock"), threading.Event()
    monkeypatch.setattr(loading, "print", lambda *_, **__: said.set(), raising=False)
    held.acquire()
    waiting = threading.Thread(target=load, args=("mnist", folder))
    waiting.start()
    assert said.wait(10)
    waiting.join(0.2)
    assert waiting.is_alive()
    assert server.asked == []
    held.release()
    waiting.join()
    assert len(server.asked) == 4


def tar_gz(members):
    """An archive of (name, content) and of ready-made TarInfos."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                archive.addfile(info, io.BytesIO(member[1]))
    return out.getvalue()


@pytest.fixture
def cifar(tmp_path):
    """The members of an archive as CIFAR-100's, with some that nobody asked for."""
    write_cifar(tmp_path / "original", ("train.bin", "test.bin"), [20, 100])
    members = [
        (f"cifar-100-binary/{n}", (tmp_path / "original" / n).read_bytes()) for n in ("train.bin", "test.bin")
    ]
    return [
        ("../escaped", b"x"),
        ("/tmp/train.bin", b"x"),
        ("cifar-100-binary/fine_label_names.txt", b"x"),
        *members,
    ]


def test_an_archive_is_downloaded_and_unpacked(server, cifar, tmp_path, monkeypatch):
    content = tar_gz(cifar)
    serve(server, monkeypatch, "cifar100", {"cifar-100-binary.tar.gz": content})
    folder = tmp_path / "new"
    first = load("cifar100", folder)
    assert left_over(tmp_path / "new") == ["test.bin", "train.bin"]
    assert not (tmp_path / "escaped").exists()
    there = tmp_path / "there"
    there.mkdir()
    (there / "cifar-100-binary.tar.gz").write_bytes(content)
    assert torch.equal(load("cifar100", there, download=False).train_x, first.train_x)
    assert left_over(there) == ["cifar-100-binary.tar.gz", "test.bin", "train.bin"]
    assert len(server.asked) == 1
    (there / "cifar-100-binary/train.bin").unlink()
    (there / "cifar-100-binary.tar.gz").write_bytes(content[:-1])
    refused("cifar100", there, "is not the original", "delete it", download=True)
    assert left_over(there) == ["cifar-100-binary.tar.gz", "test.bin"]


def test_bad_archives_leave_nothing(server, cifar, tmp_path, monkeypatch):
    link = tarfile.TarInfo("cifar-100-binary/train.bin")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    sound = tar_gz(cifar)
    archives = {
        "lacks cifar-100-binary/test.bin": tar_gz(cifar[:-1]),
        "something else than a plain file": tar_gz([link, cifar[-1]]),
        "no sound tar.gz archive": gzip.compress(b"no tar" * 100),
        "cannot be unpacked": b"no gzip",
        "Compressed file ended": sound[: len(sound) // 2],
        "inflates to more than 1048576 bytes": tar_gz([*cifar[:-1], ("bomb", bytes(1 << 22)), cifar[-1]]),
    }
    monkeypatch.setattr(unpack, "INFLATED", 1 << 20)
    for count, (message, content) in enumerate(archives.items()):
        folder = tmp_path / f"new{count}"
        folder.mkdir()
        serve(server, monkeypatch, "cifar100", {"cifar-100-binary.tar.gz": content})
        (folder / "cifar-100-binary.tar.gz").write_bytes(content)
        refused("cifar100", folder, folder / "cifar-100-binary.tar.gz", message)
        assert left_over(folder) == ["cifar-100-binary.tar.gz"]


def test_what_is_not_installed_is_named(mnist, tmp_path, monkeypatch):
    np.savez(tmp_path / "own.npz", x=1)
    write_svhn(tmp_path / "svhn")
    write_cifar(tmp_path / "cifar-100-binary", ("train.bin", "test.bin"), [20, 100])
    for module in ("numpy", "scipy", "scipy.io", "sklearn", "sklearn.datasets", "pooch", "tqdm", "requests"):
        monkeypatch.setitem(sys.modules, module, None)
    load("mnist", tmp_path)
    load("cifar100", tmp_path)
    for name, module in (("svhn", "scipy"), ("digits", "sklearn"), ("cifar10", "pooch")):
        refused(name, tmp_path, f"needs {module}: pip install 'pathsgd[paper]'", download=True)
    refused(f"own={tmp_path / 'own.npz'}", None, "needs numpy: pip install 'pathsgd[paper]'")


def test_where_data_is_looked_for(mnist, tmp_path, monkeypatch):
    monkeypatch.setenv("PATHSGD_DATA", str(tmp_path))
    assert len(load("mnist", download=False).train_y) == 7
    monkeypatch.delenv("PATHSGD_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert loading.default_data_dir() == tmp_path / ".cache/pathsgd/data"
    monkeypatch.setenv("PATHSGD_DATA", "~nobody-of-this-name/data")
    refused("mnist", None, "no home folder")
    refused("imagenet", None, "no data set is called 'imagenet'", "NAME=FILE.npz")


def test_the_command(mnist, tmp_path, capsys):
    own = tmp_path / "own.npz"
    np.savez(own, train_x=pixels(4, 90), train_y=np.arange(4), test_x=pixels(2, 90), test_y=np.arange(2))
    assert cli.main(["data", "--data-dir", str(tmp_path)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "data set"
    assert lines[0].split() == ["MNIST", "784", "(28x28", "grey)", "10", "7", "3"]
    assert lines[1].split() == ["digits", "64", "(8x8", "grey)", "10", "1442", "355"]
    assert lines[2] == "MNIST here is not the whole of it: the original has 60000 + 10000 examples"
    assert [line.split(" is not in ")[0] for line in lines[3:]] == ["CIFAR-10", "CIFAR-100", "SVHN"]
    names = ["mnist", "svhn", f"own={own}", "mnist"]
    assert cli.main(["data", *names, "--no-download", "--json", "--data-dir", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert [(row["name"], row["dimensionality"]) for row in found["datasets"]] == [
        ("mnist", "784 (28x28 grey)"),
        ("own", "90"),
    ]
    assert list(found["errors"]) == ["svhn"]
    assert printed.err.splitlines() == [f"pathsgd: {found['errors']['svhn']}"]
    with pytest.raises(SystemExit):
        cli.main(["data", "--help"])
    assert "Local copies are found" in capsys.readouterr().out
