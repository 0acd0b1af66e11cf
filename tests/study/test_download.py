"""Downloads: checked by their sha256, retried, whole or not there."""

import gc
import gzip
import hashlib
import io
import tarfile
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from filelock import FileLock

from study import files, sources
from study.sources import SOURCES, Remote, load
from support.data_files import left_over, refused, write_cifar, write_mnist

# pooch leaves the socket of a failed download to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"
)


MNIST_FILES = SOURCES["mnist"].train_files + SOURCES["mnist"].test_files


@pytest.fixture
def mnist(tmp_path):
    return write_mnist(tmp_path)


@pytest.fixture
def server(monkeypatch):
    """Serves ``content`` by path. ``cuts`` has the bytes after which the next answers break off."""
    state = SimpleNamespace(content={}, cuts=[], asked=[], status=[])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            state.asked.append(self.path)
            whole = state.content.get(self.path)
            if state.status or whole is None:
                self.send_error(state.status.pop(0) if state.status else 404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(whole)))
            self.end_headers()
            self.wfile.write(whole[: state.cuts.pop(0)] if state.cuts else whole)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        state.url = f"http://127.0.0.1:{http.server_port}/"
        monkeypatch.setattr(sources, "RETRIES", 0)
        yield state
        http.shutdown()
        thread.join()
        gc.collect()


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
    assert left_over(folder) == sorted(MNIST_FILES)
    own = folder / "MNIST/raw/train-labels-idx1-ubyte.gz"
    own.write_bytes(gzip.decompress(own.read_bytes()))  # sound, but not the original's bytes
    kept = own.read_bytes()
    (folder / "MNIST/raw/t10k-labels-idx1-ubyte.gz").unlink()
    load("mnist", folder)
    load("mnist", folder)
    assert len(server.asked) == 5
    assert own.read_bytes() == kept


def test_a_download_that_fails_is_tried_again(served, monkeypatch):
    server, folder, _ = served
    monkeypatch.setattr(sources, "RETRIES", 1)
    server.status = [503]
    load("mnist", folder)
    assert len(server.asked) == 5
    assert left_over(folder) == sorted(MNIST_FILES)


def test_a_cut_download_leaves_nothing(served):
    server, folder, _ = served
    server.cuts = [100]
    refused("mnist", folder, server.url + min(MNIST_FILES), download=True)
    assert left_over(folder) == []
    load("mnist", folder)
    assert left_over(folder) == sorted(MNIST_FILES)


def test_servers_that_have_something_else(served):
    server, folder, _ = served
    first = min(MNIST_FILES)
    whole = server.content.pop(f"/{first}")
    refused("mnist", folder, server.url + first, "404 Client Error: Not Found", folder, download=True)
    for other in (whole[:-1], whole + b"x", bytes([whole[0] ^ 1]) + whole[1:]):
        server.content[f"/{first}"] = other
        message = refused("mnist", folder, "sha256 is not", "deleted", folder / "MNIST", download=True)
        assert "tmp" not in message.replace(str(folder), "")  # no temporary file is named
        assert left_over(folder) == []


def test_no_server_and_no_folder(served, tmp_path, monkeypatch):
    _, folder, _ = served
    remotes = tuple(r._replace(url="http://127.0.0.1:9/" + r.name) for r in SOURCES["mnist"].remotes)
    monkeypatch.setitem(SOURCES, "mnist", replace(SOURCES["mnist"], remotes=remotes))
    refused("mnist", folder, "cannot be downloaded", "Connection refused", download=True)
    assert left_over(folder) == []
    (tmp_path / "file").write_text("")
    refused("mnist", tmp_path / "file", "is not a folder that can be written to", "--data-dir", download=True)


def test_one_process_at_a_time(served, monkeypatch):
    server, folder, _ = served
    folder.mkdir(parents=True)
    held, said = FileLock(folder / ".lock"), threading.Event()
    monkeypatch.setattr(files, "print", lambda *_, **__: said.set(), raising=False)
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
    """The members of an archive as CIFAR-100's, with some that are not wanted."""
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


def test_an_archive_that_cannot_be_unpacked_leaves_nothing(server, cifar, tmp_path, monkeypatch):
    sound = tar_gz(cifar)
    for count, content in enumerate((tar_gz(cifar[:-1]), b"no gzip", sound[: len(sound) // 2])):
        folder = tmp_path / f"new{count}"
        folder.mkdir()
        serve(server, monkeypatch, "cifar100", {"cifar-100-binary.tar.gz": content})
        (folder / "cifar-100-binary.tar.gz").write_bytes(content)
        message = refused("cifar100", folder, folder / "cifar-100-binary.tar.gz", "cannot be unpacked")
        assert ".unpacking" not in message
        assert left_over(folder) == ["cifar-100-binary.tar.gz"]
