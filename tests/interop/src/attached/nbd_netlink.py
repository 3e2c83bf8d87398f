"""Attaches an NBD export to the kernel so that the device outlives its server.

    connect|reconnect SOCKET INDEX CONNECTIONS

When all connections are gone, requests wait for new ones, up to a minute.
"""
import socket
import struct
import sys

TIMEOUT_SECONDS = 4  # until a request on a dead connection goes to another
DEAD_SECONDS = 60  # until requests fail for want of any connection


def exactly(connection, count):
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            sys.exit("the server hung up")
        data += piece
    return data


def negotiate(path):
    """A connection in the transmission phase, the export's size and flags."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    assert exactly(connection, 16) == b"NBDMAGICIHAVEOPT"
    exactly(connection, 2)
    go = struct.pack(">IH", 0, 0)  # the export without a name, no further information
    connection.sendall(struct.pack(">I", 3) + b"IHAVEOPT" + struct.pack(">II", 7, len(go)) + go)
    size = flags = 0
    while True:
        _, _, kind, length = struct.unpack(">QIII", exactly(connection, 20))
        data = exactly(connection, length)
        if kind == 1:
            return connection, size, flags
        if kind & 1 << 31:
            sys.exit("the server refuses: %#x %r" % (kind, data))
        if kind == 3 and data[:2] == b"\0\0":
            size, flags = struct.unpack(">QH", data[2:12])


def attribute(kind, data):
    padding = -len(data) % 4
    return struct.pack("=HH", len(data) + 4, kind) + data + b"\0" * padding


def nested(kind, data):
    return attribute(kind | 0x8000, data)


def number(kind, value):
    return attribute(kind, struct.pack("=Q", value))


class Netlink:
    def __init__(self):
        self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 16)
        self.socket.bind((0, 0))
        reply = self.ask(16, 3, attribute(2, b"nbd\0"))  # which number has the family?
        at = 20
        while at < len(reply):
            length, kind = struct.unpack_from("=HH", reply, at)
            if kind == 1:
                (self.family,) = struct.unpack_from("=H", reply, at + 4)
            at += (length + 3) & ~3

    def ask(self, family, command, attributes):
        """Sends a command; returns the first answer, which may be an acknowledgement."""
        body = struct.pack("=BBH", command, 1, 0) + attributes
        self.socket.send(struct.pack("=IHHII", len(body) + 16, family, 5, 1, 0) + body)
        first = None
        while True:
            reply = self.socket.recv(65536)
            at = 0
            while at < len(reply):
                length, kind = struct.unpack_from("=IH", reply, at)
                message = reply[at : at + length]
                if kind == 2:
                    (error,) = struct.unpack_from("=i", message, 16)
                    if error:
                        sys.exit("the kernel refuses: error %d" % -error)
                    return first or message
                first = first or message
                at += (length + 3) & ~3


def main():
    verb, path, index, count = sys.argv[1:]
    made = [negotiate(path) for _ in range(int(count))]
    _, size, flags = made[0]
    sockets = b""
    for connection, _, _ in made:
        sockets += nested(1, attribute(1, struct.pack("=I", connection.fileno())))
    attributes = attribute(1, struct.pack("=I", int(index))) + nested(7, sockets)
    attributes += number(4, TIMEOUT_SECONDS) + number(8, DEAD_SECONDS)
    if verb == "connect":
        attributes += number(2, size) + number(3, 512) + number(5, flags)
    netlink = Netlink()
    netlink.ask(netlink.family, {"connect": 1, "reconnect": 3}[verb], attributes)


main()
