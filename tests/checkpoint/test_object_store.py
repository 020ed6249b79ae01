"""Checkpoints in an object store: a server that speaks S3, behind a wire that can be made slow."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest

from kerasdp.checkpoint import files
from kerasdp.checkpoint.storage import folder_at, require_folder
from kerasdp.errors import UserError
from tests.checkpoint.test_storage import some
from tests.helpers import ROOT, environment

pytestmark = pytest.mark.proof
fsspec = pytest.importorskip("fsspec")
NEEDS = "needs pip install -e '.[proofs]'"
pytest.importorskip("s3fs", reason=NEEDS)
moto_server = pytest.importorskip("moto.server", reason=NEEDS)

BUCKET = "s3://bucket"


class Wire:
    """Passes on what a client sends to a server, and what it answers; slowly, if `bytes_per_second` is set."""

    def __init__(self, port: int):
        self.server, self.bytes_per_second, self.num_bytes = port, None, 0
        self.door = socket.create_server(("127.0.0.1", 0))
        self.door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # or it would all be on its way at once
        self.port = self.door.getsockname()[1]
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.door.accept()
                server = socket.create_connection(("127.0.0.1", self.server))
                for ends in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self.pass_on, args=ends, daemon=True).start()

    def pass_on(self, source, target, counts):
        with contextlib.suppress(OSError):
            while content := source.recv(4096):
                if counts:
                    self.num_bytes += len(content)
                    if self.bytes_per_second:
                        time.sleep(len(content) / self.bytes_per_second)
                target.sendall(content)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def wire(monkeypatch):
    server = moto_server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    wire = Wire(server.get_host_and_port()[1])
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{wire.port}", "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    post(wire, "reset")
    fsspec.filesystem("s3").mkdir("bucket")
    yield wire
    wire.door.close()
    server.stop()
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def post(wire, what, content=b""):
    """Tells the server something that is not S3: https://docs.getmoto.org/en/latest/docs/configuration/."""
    url = f"http://127.0.0.1:{wire.port}/moto-api/{what}"
    urllib.request.urlopen(urllib.request.Request(url, content, {"Content-Type": "text/plain"}, method="POST")).close()


def test_refusals(wire, monkeypatch):
    with pytest.raises(UserError, match=r"cannot use 's3://nobucket/run' \(.*bucket does not exist"):
        require_folder("s3://nobucket/run", resume=False)
    assert "nobucket" not in fsspec.filesystem("s3").ls("")  # nor is it made
    post(wire, "reset-auth", b"0")  # from here on nobody may do anything
    with pytest.raises(UserError, match=r"cannot use 's3://bucket/run' \(.*(Forbidden|denied|does not exist)"):
        require_folder(f"{BUCKET}/run", resume=False)
    post(wire, "reset-auth", b"1000000000")
    require_folder(f"{BUCKET}/run", resume=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    begin = time.monotonic()
    with pytest.raises(UserError, match="cannot use 's3://bucket/run' .*Could not connect"):
        require_folder(f"{BUCKET}/run", resume=False)
    print(f"\nunreachable after {time.monotonic() - begin:.1f} s")


KILLED = """
import sys
from kerasdp.checkpoint import files
from tests.checkpoint.test_storage import some
files.save(files.path_of(sys.argv[1], 2), some(2, int(sys.argv[2])))
"""


@pytest.mark.parametrize("size", [1700, 6000], ids=["12 MB in one put", "144 MB in parts"])
def test_one_that_is_killed_while_it_is_sent_leaves_nothing(size, wire):
    place = f"{BUCKET}/run"
    files.save(files.path_of(place, 1), some(1))
    wire.num_bytes, wire.bytes_per_second = 0, 2_000_000 if size == 1700 else 20_000_000
    sender = subprocess.Popen([sys.executable, "-c", KILLED, place, str(size)], cwd=ROOT, env=environment())
    half = 4 * size * size // 2
    while wire.num_bytes < half:
        assert sender.poll() is None, "it was sent before it could be killed"
        time.sleep(0.01)
    os.kill(sender.pid, signal.SIGKILL)
    sender.wait()
    wire.bytes_per_second = None
    time.sleep(1)
    assert half <= wire.num_bytes < 2 * half
    assert folder_at(place).names() == ["step-00000001.safetensors"]
    path, found = files.load_newest(place, lambda text: pytest.fail(text))
    assert found.state["step"] == 1
    files.save(files.path_of(place, 2), some(2))  # and the next one is
    assert files.load_newest(place, print)[1].state["step"] == 2
