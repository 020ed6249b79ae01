"""A program of nobody's run that knocks at the ports of one.

python stranger.py SETTINGS, as JSON:
    kinds: some of `KINDS`, all at a time
    places: [address, port] of each port
    marker: a file that is made by whoever reads what this program sends as a pickle
    recorded: what hosts of another run have sent, by `record.py`; a file
It prints `knocks` and how many connections it has made once all of them have begun, and continues until it is ended.
"""

import base64
import contextlib
import hashlib
import hmac
import itertools
import json
import os
import pickle
import random
import socket
import struct
import sys
import threading
import time

SETTINGS = json.loads(sys.argv[1]) if __name__ == "__main__" else {}
HELD = []  # connections that stay
NUM_GREETINGS = 7


class Payload:
    """Makes the marker where it is read."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def connected(place):
    connection = socket.create_connection(place, 5)
    HELD.append(connection)
    return connection


def frames_of(content):
    """A message as several protocols would have it: as it is, behind its length, or in a greeting of this kit's."""
    size = len(content)
    yield content
    for head in ("<I", ">I", "<Q", ">Q"):
        yield struct.pack(head, size) + content
    for kind in range(8):
        yield struct.pack("<BIqq", kind, 0, 0, size) + content


def greetings(words, greeting):
    """Words that a host says of itself, with proofs of secrets that are not the run's."""
    own = bytes(range(32))
    theirs = greeting[-32:].rjust(32, b"\0")
    for key in (b"", b"guessed", b"changeme"):
        for role in (b"joins", b"listens"):
            digest = hmac.new(key, role + theirs + own, hashlib.sha256).digest()
            yield greeting[:-32] + own + digest + struct.pack("<I", len(words)) + words
    yield greeting + bytes(32) + struct.pack("<I", len(words)) + words


def say(place, message):
    """Says one message, and leaves the connection open."""
    connected(place).sendall(message)


def answer(place, words, number):
    """Waits for a greeting, however long that takes, and answers it."""
    connection = connected(place)
    connection.settimeout(None)
    greeting = connection.recv(4096)
    connection.sendall(next(itertools.islice(greetings(words, greeting), number, None)))


def say_all(place, words):
    """In all frames, and in the middle of a greeting of each sort."""
    for number in range(NUM_GREETINGS):
        threading.Thread(target=quietly, args=(answer, place, words, number), daemon=True).start()
    for frame in frames_of(words):
        quietly(say, place, frame)


def pickles(place):
    for protocol in (0, 4):
        say_all(place, pickle.dumps(Payload(SETTINGS["marker"]), protocol=protocol))


def claims(place):
    """To be process 1."""
    name = "host 10.77.0.3 (host2, process 1)"
    for words in (
        pickle.dumps((1, 2, name)), json.dumps([1, 2, name]).encode(), struct.pack("<II", 1, 2) + name.encode(),
        json.dumps({"rank": 1, "num_processes": 2, "name": name}).encode(),
    ):  # fmt: skip
        say_all(place, words)


def garbage(place):
    draw = random.Random(0)
    for content in (*map(draw.randbytes, (1, 3, 17, 100, 4096, 1 << 20)), b"\xff" * 4096, bytes(4096)):
        quietly(say, place, content)
    connected(place).close()


def silence(place):
    for _ in range(4):
        connected(place)


def dripping(place):
    connection = connected(place)

    def drip():
        while True:
            time.sleep(2)
            connection.sendall(b"k")

    threading.Thread(target=quietly, args=(drip,), daemon=True).start()


def http(place):
    say(place, f"GET / HTTP/1.1\r\nHost: {place[0]}\r\n\r\n".encode())
    say(place, b"POST /" + b"a" * 100000)


def tls(place):
    hello = bytes.fromhex("0100002f0303") + bytes(32) + bytes.fromhex("000008130113021303c02f0100")
    say(place, b"\x16\x03\x01" + struct.pack(">H", len(hello)) + hello)


def crowd(place):
    for _ in range(200):
        connected(place)


def mirror(place):
    """Gives back what it is told: the proof that it is asked for, if that were symmetric."""
    connection = connected(place)

    def reflect():
        while received := connection.recv(1 << 16):
            connection.sendall(received)

    threading.Thread(target=quietly, args=(reflect,), daemon=True).start()


def replay(place):
    with open(SETTINGS["recorded"]) as file:
        streams = [base64.b64decode(text) for text in json.load(file)]
    for stream in streams:
        quietly(say, place, stream)
        quietly(say, place, stream[:100])


def half_open(place):
    """Begins connections from addresses where nobody is, so that they stay half made."""
    port = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
    target = socket.inet_aton(place[0])
    for number in range(200):
        source = socket.inet_aton(f"10.77.0.{200 + number % 50}")
        head = struct.pack(">HHIIBBHHH", 1024 + number, place[1], number, 0, 5 << 4, 2, 64000, 0, 0)
        pseudo = source + target + struct.pack(">BBH", 0, 6, len(head))
        head = head[:16] + struct.pack(">H", _checksum(pseudo + head)) + head[18:]
        packet = struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(head), number, 0, 64, 6, 0) + source + target + head
        port.sendto(packet, (place[0], 0))


def _checksum(data):
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


KINDS = {
    each.__name__: each
    for each in (
        pickles, claims, garbage, silence, dripping, http, tls, crowd, mirror, replay, half_open
    )
}  # fmt: skip


def quietly(function, *arguments):
    """Does it; may be sent away, which is well."""
    with contextlib.suppress(OSError):
        function(*arguments)


def knock(kind, place):
    quietly(KINDS[kind], place)


def main():
    jobs = [(kind, tuple(place)) for place in SETTINGS["places"] for kind in SETTINGS["kinds"]]
    threads = [threading.Thread(target=knock, args=job, daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    print("knocks", len(HELD), flush=True)
    for thread in threads:
        thread.join()
    print("has knocked", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
