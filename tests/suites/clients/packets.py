#!/usr/bin/python3
"""Sends packets that no socket would send, from the network namespace that it runs in.

  packets.py malformed SEED COUNT FRONTEND...     random packets to these addresses; prints how many of each kind
  packets.py fragments SOURCE FRONTEND SIZE ORDER one UDP datagram in fragments: "reversed", "shuffled" or "overlapping"

FRONTEND and SOURCE are ADDRESS|PORT. Packets leave by the interface eth0 to the next hop of the address, as frames (AF_PACKET), so
the kernel of the sender corrects nothing. The same seed sends the same packets. Debian: python3, iproute2.
"""

import collections
import ipaddress
import json
import random
import socket
import struct
import subprocess
import sys
import time

INTERFACE = "eth0"
TCP, UDP, SCTP, ICMP, ICMP6 = 6, 17, 132, 1, 58
HOP, ROUTING, FRAGMENT, DESTINATION = 0, 43, 44, 60


def checksum(data):
    if len(data) % 2:
        data += b"\0"
    total = sum(struct.unpack("!%dH" % (len(data) // 2), data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def packed(address):
    return ipaddress.ip_address(address).packed


def pseudo(source, destination, protocol, length):
    if len(source) == 4:
        return source + destination + struct.pack("!BBH", 0, protocol, length)
    return source + destination + struct.pack("!II", length, protocol)


def ipv4(source, destination, protocol, payload, *, options=b"", flags=0, offset=0, ident=0, ttl=64, total=None,
         ihl=None, wrong=False):
    header_length = 20 + len(options)
    first = 0x40 | (header_length // 4 if ihl is None else ihl)
    total = header_length + len(payload) if total is None else total
    fields = [first, 0, total & 0xFFFF, ident, (flags << 13) | offset, ttl, protocol, 0, source, destination]
    header = struct.pack("!BBHHHBBH4s4s", *fields) + options
    fields[7] = checksum(header) ^ (0x5555 if wrong else 0)
    return struct.pack("!BBHHHBBH4s4s", *fields) + options + payload


def ipv6(source, destination, protocol, payload, *, length=None, hops=64, flow=0):
    length = len(payload) if length is None else length
    return struct.pack("!IHBB16s16s", 0x60000000 | flow, length & 0xFFFF, protocol, hops, source, destination) + payload


def udp(source, destination, ports, data, *, length=None, check=None):
    length = 8 + len(data) if length is None else length
    header = struct.pack("!HHHH", *ports, length & 0xFFFF, 0)
    if check is None:
        check = checksum(pseudo(source, destination, UDP, len(header + data)) + header + data) or 0xFFFF
    return struct.pack("!HHHH", *ports, length & 0xFFFF, check) + data


def tcp(source, destination, ports, data, *, flags=2, options=b"", offset=None, wrong=False, number=0):
    offset = (20 + len(options)) // 4 if offset is None else offset
    fields = [*ports, number, 0, (offset & 15) << 4, flags, 0xFFFF, 0, 0]
    segment = struct.pack("!HHIIBBHHH", *fields) + options + data
    fields[7] = checksum(pseudo(source, destination, TCP, len(segment)) + segment) ^ (0x5555 if wrong else 0)
    return struct.pack("!HHIIBBHHH", *fields) + options + data


class Link:
    """Sends frames by the interface."""

    def __init__(self):
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
        self.socket.bind((INTERFACE, 0))
        self.own = self.socket.getsockname()[4]
        self.hops = {}

    def hop(self, address):
        """The hardware address of the next hop. Raises if no host answers for it."""
        if address in self.hops:
            return self.hops[address]
        found = json.loads(subprocess.check_output(["ip", "-j", "route", "get", address]))[0]
        via = found.get("gateway", address)
        for _ in range(50):
            with socket.socket(socket.AF_INET6 if ":" in via else socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.sendto(b"", (via, 9))
            for neighbour in json.loads(subprocess.check_output(["ip", "-j", "neigh", "show", "to", via])):
                if "lladdr" in neighbour:
                    self.hops[address] = bytes.fromhex(neighbour["lladdr"].replace(":", ""))
                    return self.hops[address]
            time.sleep(0.1)
        raise SystemExit(f"no neighbour {via} for {address}")

    def send(self, address, packet, kind=None):
        kind = (0x86DD if ":" in address else 0x0800) if kind is None else kind
        frame = self.hop(address) + self.own + struct.pack("!H", kind) + packet
        for _ in range(200):
            try:
                self.socket.send(frame[:1514])
                return
            except OSError as error:
                # The queue of the device is full.
                if error.errno != 105:
                    raise
                time.sleep(0.005)


def fragments_of(source, destination, protocol, payload, size, ident):
    """(offset, packet) of each fragment; `size` is a multiple of 8."""
    made = []
    for offset in range(0, len(payload), size):
        part = payload[offset : offset + size]
        more = offset + size < len(payload)
        made.append((offset, fragment(source, destination, protocol, part, offset, more, ident)))
    return made


def fragment(source, destination, protocol, part, offset, more, ident):
    if len(source) == 4:
        return ipv4(source, destination, protocol, part, flags=1 if more else 0, offset=(offset // 8) & 0x1FFF,
                    ident=ident & 0xFFFF)
    header = struct.pack("!BBHI", protocol, 0, (offset & 0xFFF8) | (1 if more else 0), ident)
    return ipv6(source, destination, FRAGMENT, header + part)


class Malformed:
    """Makes random packets. Each method is a kind of harm."""

    def __init__(self, random_, own, frontends):
        self.random, self.own, self.frontends = random_, own, frontends

    def next(self):
        address, port = self.random.choice(self.frontends)
        source, destination = packed(self.own[":" in address]), packed(address)
        kinds = [name for name in dir(self) if name.startswith("kind_")]
        name = self.random.choice(kinds)
        return name[5:], address, getattr(self, name)(source, destination, port)

    def bytes(self, most):
        return self.random.randbytes(self.random.randint(0, most))

    def ports(self, port):
        return (self.random.randint(1024, 65535), port)

    def segment(self, source, destination, port):
        """A valid header of layer 4: protocol and bytes."""
        ports, data = self.ports(port), self.bytes(64)
        kind = self.random.randint(0, 3)
        if kind == 0:
            return UDP, udp(source, destination, ports, data)
        if kind == 1:
            return TCP, tcp(source, destination, ports, data, flags=self.random.randint(0, 255))
        if kind == 2:
            return SCTP, struct.pack("!HHII", *ports, 0, 0) + struct.pack("!BBH", 1, 0, 20) + self.random.randbytes(16)
        return (ICMP if len(source) == 4 else ICMP6), self.icmp(source, destination, b"")

    def icmp(self, source, destination, inner):
        kind = self.random.choice([0, 3, 4, 5, 8, 11, 12] if len(source) == 4 else [1, 2, 3, 4, 128, 129, 137])
        head = struct.pack("!BBHI", kind, self.random.randint(0, 15), 0, self.random.getrandbits(32)) + inner
        over = b"" if len(source) == 4 else pseudo(source, destination, ICMP6, len(head))
        return head[:2] + struct.pack("!H", checksum(over + head)) + head[4:]

    def packet(self, source, destination, protocol, payload, **more):
        make = ipv4 if len(source) == 4 else ipv6
        return make(source, destination, protocol, payload, **more)

    def kind_short(self, source, destination, port):
        whole = self.packet(source, destination, *self.segment(source, destination, port))
        return whole[: self.random.randint(0, len(whole) - 1)]

    def kind_short_but_consistent(self, source, destination, port):
        protocol, segment = self.segment(source, destination, port)
        return self.packet(source, destination, protocol, segment[: self.random.randint(0, min(19, len(segment)))])

    def kind_flipped(self, source, destination, port):
        whole = bytearray(self.packet(source, destination, *self.segment(source, destination, port)))
        for _ in range(self.random.randint(1, 6)):
            whole[self.random.randrange(len(whole))] = self.random.getrandbits(8)
        return bytes(whole)

    def kind_lengths(self, source, destination, port):
        protocol, segment = self.segment(source, destination, port)
        length = self.random.choice([0, 1, 19, 20, 21, 60, 1500, 65535])
        if len(source) == 16:
            return ipv6(source, destination, protocol, segment, length=length)
        return ipv4(source, destination, protocol, segment, total=length, ihl=self.random.choice([0, 4, 5, 6, 15]))

    def kind_lengths_of_udp(self, source, destination, port):
        length = self.random.choice([0, 1, 7, 8, 9, 4000, 65535])
        payload = udp(source, destination, self.ports(port), self.bytes(64), length=length)
        return self.packet(source, destination, UDP, payload)

    def kind_checksums(self, source, destination, port):
        if self.random.getrandbits(1):
            payload = udp(source, destination, self.ports(port), self.bytes(64), check=self.random.choice([0, 1, 0xDEAD]))
            return self.packet(source, destination, UDP, payload)
        segment = tcp(source, destination, self.ports(port), b"", wrong=True)
        wrong = {"wrong": True} if len(source) == 4 and self.random.getrandbits(1) else {}
        return self.packet(source, destination, TCP, segment, **wrong)

    def kind_options(self, source, destination, port):
        protocol, segment = self.segment(source, destination, port)
        if len(source) == 4:
            options = self.random.choice([
                # Loose and strict source routes, record route, timestamp, router alert, and noise.
                struct.pack("!BBB4s", 131, 7, 4, destination) + b"\0",
                struct.pack("!BBB4s", 137, 7, 4, destination) + b"\0",
                b"\x07\x27\x04" + bytes(37), b"\x44\x24\x05\x01" + bytes(32), b"\x94\x04\0\0",
                b"\x83\xff\x04\0", b"\x07\x00\0\0", self.random.randbytes(4 * self.random.randint(1, 10)),
            ])
            return ipv4(source, destination, protocol, segment, options=options)
        for _ in range(self.random.randint(1, 8)):
            extension = self.random.choice([HOP, DESTINATION, ROUTING])
            length = self.random.choice([0, 0, 1, 2, 255])
            segment = struct.pack("!BB", protocol, length) + self.random.randbytes(6 + 8 * min(length, 2)) + segment
            protocol = extension
        return ipv6(source, destination, protocol, segment)

    def kind_options_of_tcp(self, source, destination, port):
        options = self.random.choice([b"\x02\x04\0\0", b"\x02\xff\0\0", b"\x05\x00\0\0", self.random.randbytes(40)])
        offset = self.random.choice([None, 0, 4, 15])
        segment = tcp(source, destination, self.ports(port), self.bytes(8), options=options, offset=offset)
        return self.packet(source, destination, TCP, segment)

    def kind_fragments(self, source, destination, port):
        protocol, segment = self.segment(source, destination, port)
        offset = self.random.choice([0, 0, 8, 8, 16, 24, 1480, 65528])
        part = segment + self.bytes(600) if self.random.getrandbits(1) else self.bytes(32)
        more = bool(self.random.getrandbits(1))
        # Few identifications, so that fragments of different packets meet and overlap.
        return fragment(source, destination, protocol, part, offset, more, self.random.randint(1, 8))

    def kind_errors(self, source, destination, port):
        protocol, segment = self.segment(destination, source, port)
        inner = self.packet(destination, source, protocol, segment)[: self.random.randint(0, 90)]
        protocol = ICMP if len(source) == 4 else ICMP6
        return self.packet(source, destination, protocol, self.icmp(source, destination, inner))

    def kind_sources(self, source, destination, port):
        odd = ["0.0.0.0", "127.0.0.1", "255.255.255.255", "224.0.0.1"] if len(source) == 4 else ["::", "::1", "ff02::1",
                                                                                                "::ffff:127.0.0.1"]
        source = self.random.choice([destination, *map(packed, odd)])
        protocol, segment = self.segment(source, destination, port)
        return self.packet(source, destination, protocol, segment)

    def kind_lives(self, source, destination, port):
        protocol, segment = self.segment(source, destination, port)
        lives = self.random.randint(0, 1)
        more = {"ttl": lives} if len(source) == 4 else {"hops": lives}
        return self.packet(source, destination, protocol, segment, **more)

    def kind_noise(self, source, _destination, _port):
        first = bytes([(0x40 if len(source) == 4 else 0x60) | self.random.getrandbits(4)])
        return first + self.bytes(200)


def own_addresses():
    """The first global address of each family."""
    found = {}
    for entry in json.loads(subprocess.check_output(["ip", "-j", "address", "show", "dev", INTERFACE]))[0]["addr_info"]:
        if entry["scope"] == "global":
            found.setdefault(entry["family"] == "inet6", entry["local"])
    return found


def frontend(text):
    address, port = text.split("|")
    return address, int(port)


def send_malformed(seed, count, frontends):
    maker = Malformed(random.Random(int(seed)), own_addresses(), [frontend(text) for text in frontends])
    link, sent = Link(), collections.Counter()
    for _ in range(int(count)):
        kind, address, packet = maker.next()
        link.send(address, packet)
        sent[kind] += 1
    print(json.dumps(sent))


def send_fragments(source, to, size, order):
    (own, own_port), (address, port) = frontend(source), frontend(to)
    data = bytes(index % 251 for index in range(int(size)))
    datagram = udp(packed(own), packed(address), (own_port, port), data)
    link, ident = Link(), random.getrandbits(16)
    made = fragments_of(packed(own), packed(address), UDP, datagram, 1200, ident)
    if order == "overlapping":
        # The same place twice, with other bytes: the receiver may use neither.
        wrong = fragment(packed(own), packed(address), UDP, b"\xff" * 1200, 600, True, ident)
        made = [made[0], (600, wrong), *made[1:]]
    elif order == "shuffled":
        random.shuffle(made)
    else:
        made.reverse()
    for _, packet in made:
        link.send(address, packet)
    print(len(made))


if __name__ == "__main__":
    {"malformed": lambda seed, count, *to: send_malformed(seed, count, to), "fragments": send_fragments}[sys.argv[1]](
        *sys.argv[2:])
