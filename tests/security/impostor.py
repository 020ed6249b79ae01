"""Another user of a machine, who was at a run's meeting place before it began.

python impostor.py SETTINGS, as JSON, started by root:
    uid: whom this program becomes
    ports: of 127.0.0.1, at which he listens
    sockets: paths at which he listens, in folders that he makes
    marker: a file that is made by whoever reads what he says as a pickle
It prints at how many places it listens, and continues until it is ended.
"""

import contextlib
import hashlib
import hmac
import itertools
import json
import os
import pickle
import socket
import struct
import sys
import threading
import time

import stranger
from other_user import becomes


def serve(door):
    """Answers each connection in another way."""
    for number in itertools.count():
        connection, _ = door.accept()
        threading.Thread(target=answer, args=(connection, number), daemon=True).start()


def answer(connection, number):
    words = pickle.dumps(stranger.Payload(stranger.SETTINGS["marker"]))
    connection.settimeout(0.5)
    with contextlib.suppress(OSError):
        if number % 3 == 0:  # as this kit's processes greet, with an empty secret
            connection.sendall(b"kerasdp 1\n" + bytes(32))
            said = connection.recv(4096)
            connection.sendall(hmac.new(b"", b"listens" + said[10:42] + bytes(32), hashlib.sha256).digest())
        elif number % 3 == 1:  # as they greet him
            connection.sendall(connection.recv(4096))
        for kind in range(8):
            connection.sendall(struct.pack("<BIqq", kind, 0, 0, len(words)) + words)
        for frame in stranger.frames_of(words):
            connection.sendall(frame)
        time.sleep(5)


def main():
    settings = json.loads(sys.argv[1])
    stranger.SETTINGS.update(settings)
    becomes(settings["uid"])
    doors = []
    for port in settings["ports"]:
        doors.append(socket.create_server(("127.0.0.1", port)))
    for path in settings["sockets"]:
        with contextlib.suppress(OSError):  # a folder that is not his
            os.makedirs(os.path.dirname(path), mode=0o777, exist_ok=True)
            door = socket.socket(socket.AF_UNIX)
            door.bind(path)
            os.chmod(path, 0o777)  # noqa: S103
            door.listen()
            doors.append(door)
    for door in doors:
        threading.Thread(target=serve, args=(door,), daemon=True).start()
    print(len(doors), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
