"""One connection to the Service, by which a line is sent each half second, until the file client.stop exists. Without arguments; with
"once": one line. Ends with an error if a line does not come back."""

import os
import socket
import sys
import time

connection = socket.create_connection(("10.96.0.10", 80), 20)
count = 0
while count == 0 or not os.path.exists("/run/client.stop"):
    line = b"%d\n" % count
    connection.sendall(line)
    received = b""
    while len(received) < len(line):
        received += connection.recv(100) or sys.exit(f"closed after {count} lines")
    if received != line:
        sys.exit(f"{received!r} came back")
    count += 1
    if "once" in sys.argv:
        break
    time.sleep(0.5)
print(count, "lines")
