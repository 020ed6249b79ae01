"""Runs a program on one of the hosts of `netns`, within this process, which may have its framework already.

python on_host.py NAMESPACE NAME PROGRAM [ARGUMENT ...]
"""

import ctypes
import os
import runpy
import socket
import sys

_NEWNET, _NEWUTS, _NEWNS = 0x40000000, 0x04000000, 0x00020000  # linux/sched.h
_BIND, _RECURSIVE, _SLAVE = 4096, 16384, 1 << 19  # linux/mount.h


def enter(namespace, name):
    """Becomes a process of that host, as `ip netns exec` and `unshare -u` would make it."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function, *arguments):
        if function(*arguments):
            raise OSError(ctypes.get_errno(), f"{function.__name__}: {os.strerror(ctypes.get_errno())}")

    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    call(libc.setns, descriptor, _NEWNET)
    os.close(descriptor)
    call(libc.unshare, _NEWUTS | _NEWNS)
    socket.sethostname(name)
    call(libc.mount, b"", b"/", b"none", ctypes.c_ulong(_SLAVE | _RECURSIVE), None)
    for file in ("hosts", "resolv.conf"):
        own = f"/etc/netns/{namespace}/{file}".encode()
        call(libc.mount, own, f"/etc/{file}".encode(), b"none", ctypes.c_ulong(_BIND), None)


if __name__ == "__main__":
    enter(*sys.argv[1:3])
    del sys.argv[:3]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
