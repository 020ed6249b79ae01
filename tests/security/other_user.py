"""Another user of the machine of a run, who looks at and knocks at all that he finds.

python other_user.py SETTINGS, as JSON, started by root:
    uid: whom this program becomes
    sockets: paths of Unix sockets
    paths: files and folders
    kinds, places, marker: see `stranger.py`
It prints what it could do, as JSON, when it has begun to knock, and continues until it is ended.
"""

import encodings.idna  # noqa: F401  (which Python loads when it connects: this user may not read where that lies)
import json
import os
import socket
import sys
import threading
import time

import stranger


def becomes(uid):
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def opened(paths):
    """What can be read, or listed."""
    found = []
    for path in paths:
        try:
            os.listdir(path) if os.path.isdir(path) else open(path, "rb").close()
            found.append(path)
        except OSError:
            continue
    return found


def joined(paths):
    """The Unix sockets that let this user in; he says there what a stranger says."""
    found = []
    for path in paths:
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            with socket.socket(socket.AF_UNIX, kind) as connection:
                try:
                    connection.connect("\0" + path[1:] if path.startswith("@") else path)
                    connection.send(b"x")
                    found.append(path)
                except OSError:
                    continue
    return found


def main():
    settings = json.loads(sys.argv[1])
    becomes(settings["uid"])
    stranger.SETTINGS.update(settings)
    found = {"joined": joined(settings["sockets"]), "opened": opened(settings["paths"])}
    jobs = [(kind, tuple(place)) for place in settings["places"] for kind in settings["kinds"]]
    for job in jobs:
        threading.Thread(target=stranger.knock, args=job, daemon=True).start()
    time.sleep(0.5)
    print(json.dumps(found | {"connected": len(stranger.HELD) > 0}), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
