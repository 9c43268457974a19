"""Sends back what it receives at port 8080 of the pod."""

import socket
import threading


def echo(connection):
    while data := connection.recv(100):
        connection.sendall(data)
    connection.close()


server = socket.create_server(("10.244.0.2", 8080))
while True:
    threading.Thread(target=echo, args=[server.accept()[0]], daemon=True).start()
