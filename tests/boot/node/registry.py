"""A registry of COUNT images of one layer: registry.py PORT COUNT FOLDER. Layers are sent once FOLDER/open exists; each is a line in FOLDER/sent."""

import hashlib
import http.server
import io
import json
import os
import struct
import sys
import tarfile
import time

port, count, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
blobs, manifests, layers = {}, {}, set()


def add(content):
    digest = "sha256:" + hashlib.sha256(content).hexdigest()
    blobs[digest] = content
    return {"digest": digest, "size": len(content)}


def program():
    """An ELF program for x86_64 that waits forever: pause(2) in a loop."""
    code = bytes.fromhex("b822000000 0f05 ebf7")
    start, headers = 0x400000, 64 + 56
    header = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 2, 62, 1, start + headers, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, start, start, headers + len(code), headers + len(code), 4096)
    return header + segment + code


for n in range(count):
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        for name, content in [("file", f"image {n}".encode()), ("pause", program())]:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            archive.addfile(entry, io.BytesIO(content))
    layer = add(tar.getvalue())
    layers.add(layer["digest"])
    config = {"architecture": "amd64", "os": "linux", "config": {"Entrypoint": ["/pause"]}, "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]}}
    kind = "application/vnd.oci.image."
    manifest = {
        "schemaVersion": 2,
        "mediaType": kind + "manifest.v1+json",
        "config": {"mediaType": kind + "config.v1+json", **add(json.dumps(config).encode())},
        "layers": [{"mediaType": kind + "layer.v1.tar", **layer}],
    }
    digest = add(json.dumps(manifest).encode())["digest"]
    manifests[f"/v2/image{n}/manifests/latest"] = digest
    manifests[f"/v2/image{n}/manifests/{digest}"] = digest


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path = self.path.split("?")[0]
        digest = manifests.get(path, path.rsplit("/", 1)[-1])
        content = blobs.get(digest, b"" if path == "/v2/" else None)
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Length", str(len(content or b"")))
        self.send_header("Content-Type", "application/vnd.oci.image.manifest.v1+json" if path in manifests else "application/octet-stream")
        if digest in blobs:
            self.send_header("Docker-Content-Digest", digest)
        self.end_headers()
        # After the headers: runtimes wait 30 s for them.
        self.wfile.flush()
        if self.command == "GET" and digest in layers:
            while not os.path.exists(f"{folder}/open"):
                time.sleep(0.1)
            with open(f"{folder}/sent", "a") as sent:
                sent.write(path + "\n")
        if self.command == "GET":
            self.wfile.write(content or b"")

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
