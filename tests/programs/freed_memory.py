"""Takes 100 MB, writes on them and frees them, several times; prints how many pages the system gave again.

And in how many arenas of glibc's four threads then have their memory, besides the main one.

python freed_memory.py BACKEND BYTES_OF_A_BLOCK
"""

import ctypes
import json
import os
import resource
import sys
import tempfile
import threading

from kerasdp.processes import hardware

NUM_BYTES = 100 * 10**6


def pages_given():
    """In the second of two rounds: what the first has freed may be there."""
    c_library = ctypes.CDLL(None)
    c_library.malloc.restype, c_library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    c_library.free.argtypes = [ctypes.c_void_p]
    size = int(sys.argv[2])
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        addresses = [c_library.malloc(size) for _ in range(NUM_BYTES // size)]
        for address in addresses:
            ctypes.memset(address, 1, size)
        for address in addresses:
            c_library.free(address)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def bytes_held():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def arenas_of_threads():
    c_library = ctypes.CDLL(None)
    c_library.fopen.restype = c_library.malloc.restype = ctypes.c_void_p
    together = threading.Barrier(4)

    def take():
        c_library.malloc(ctypes.c_size_t(10**5))
        together.wait()

    threads = [threading.Thread(target=take) for _ in range(together.parties)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with tempfile.NamedTemporaryFile() as file:
        stream = ctypes.c_void_p(c_library.fopen(file.name.encode(), b"w"))
        c_library.malloc_info(0, stream)
        c_library.fclose(stream)
        return file.read().count(b"<heap nr=") - 1


found = {"before": pages_given()}
begin = bytes_held()
with hardware.kept_memory(sys.argv[1]):
    found["within"], found["held"] = pages_given(), bytes_held() - begin
    found["arenas"] = arenas_of_threads()
found |= {"after": pages_given(), "left": bytes_held() - begin}
print("RESULT " + json.dumps(found))
