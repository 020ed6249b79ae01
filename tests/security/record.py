"""Records what comes to a host over TCP from another one, as anybody on the way between them could.

python record.py FROM TO FILE: addresses. It prints `records` when it has begun, and writes the file when it is ended:
the first bytes of each connection that FROM has made, in base64.
"""

import base64
import json
import signal
import socket
import struct
import sys

_MOST = 1 << 16


def main():
    sender, receiver = (socket.inet_aton(address) for address in sys.argv[1:3])
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800))
    wire.settimeout(0.2)
    streams, ended = {}, []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    print("records", flush=True)
    while not ended:
        try:
            packet = wire.recv(1 << 17)
        except TimeoutError:
            continue
        size = (packet[0] & 15) * 4
        if packet[9] != 6 or (packet[12:16], packet[16:20]) != (sender, receiver):
            continue
        segment = packet[size : int.from_bytes(packet[2:4])] if packet[2:4] != b"\0\0" else packet[size:]
        ports, number, flags = segment[:4], struct.unpack(">I", segment[4:8])[0], segment[13]
        if flags & 2 and not flags & 16:  # the first packet of a connection that the sender makes
            streams[ports] = (number + 1, bytearray(_MOST), [0])
        elif ports in streams:
            first, content, end = streams[ports]
            data, place = segment[(segment[12] >> 4) * 4 :], (number - first) % 2**32
            if data and place + len(data) <= _MOST:
                content[place : place + len(data)] = data
                end[0] = max(end[0], place + len(data))
    with open(sys.argv[3], "w") as file:
        json.dump([base64.b64encode(bytes(content[: end[0]])).decode() for _, content, end in streams.values()], file)


if __name__ == "__main__":
    main()
