"""Connects to the CRI socket and waits, for as long as it takes, until an agent begins to speak HTTP/2 on it."""

import socket

connection = socket.socket(socket.AF_UNIX)
connection.connect("/run/keelson/cri.sock")
# The client's preface and an empty SETTINGS frame; a server answers with its own SETTINGS.
connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
print("answered" if connection.recv(9)[3:4] == b"\x04" else "closed")
