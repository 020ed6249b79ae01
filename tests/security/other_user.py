"""Another user of the machine of a run, who opens all that he finds.

python other_user.py SETTINGS, as JSON, started by root:
    uid: whom this program becomes
    sockets: paths of Unix sockets
    paths: files and folders
It prints what it could do, as JSON.
"""

import json
import os
import socket
import sys


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
    """The Unix sockets that let this user in."""
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
    print(json.dumps({"joined": joined(settings["sockets"]), "opened": opened(settings["paths"])}), flush=True)


if __name__ == "__main__":
    main()
