"""A registry that the daemon of the tests can pull from: one image, and three refusals. Runs in its network.

    python registry.py PORT READY    makes the file READY once it listens

It has the image `ok`; `slow` sends its layers for a minute, `limited` is answered by 429, `broken` by 500,
every other name by 404.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from dockerd import image_root
from rz_agent.sandboxes.inside.confine import raise_loopback

TYPE = "application/vnd.docker.distribution.manifest.v2+json"


def digest(data: bytes) -> str:
    """As registries name content."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def image(root: bytes) -> tuple[bytes, dict[str, bytes]]:
    """(manifest, content by digest) of an image with these files, a tar."""
    layer = gzip.compress(root)
    config = json.dumps(
        {
            "architecture": "amd64", "os": "linux", "config": {"Env": ["PATH=/opt/bin:/usr/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [digest(root)]},
        }
    ).encode()  # fmt: skip
    blobs = {digest(config): config, digest(layer): layer}
    described = [
        {"mediaType": kind, "size": len(data), "digest": digest(data)}
        for kind, data in (
            ("application/vnd.docker.container.image.v1+json", config),
            ("application/vnd.docker.image.rootfs.diff.tar.gzip", layer),
        )
    ]
    manifest = {"schemaVersion": 2, "mediaType": TYPE, "config": described[0], "layers": described[1:]}
    return json.dumps(manifest).encode(), blobs


IMAGES = {"ok": image(image_root()), "slow": image(image_root() + bytes(1024))}
REFUSALS = {"limited": (429, "TOOMANYREQUESTS"), "broken": (500, "UNKNOWN")}


class Registry(BaseHTTPRequestHandler):
    """The part of the protocol that a pull needs."""

    def do_GET(self) -> None:
        """A manifest, a blob, or a refusal."""
        parts = self.path.strip("/").split("/")
        if parts == ["v2"]:
            return self._answer(200, b"{}", "application/json")
        name = parts[1]
        manifest, blobs = IMAGES.get(name, (b"", {}))
        if manifest and parts[2] == "manifests":
            return self._answer(200, manifest, TYPE)
        if parts[-1] in blobs:
            return self._answer(200, blobs[parts[-1]], "application/octet-stream", slow=name == "slow")
        status, code = REFUSALS.get(name, (404, "MANIFEST_UNKNOWN"))
        errors = {"errors": [{"code": code, "message": code.lower().replace("_", " ")}]}
        return self._answer(status, json.dumps(errors).encode(), "application/json")

    do_HEAD = do_GET

    def _answer(self, status: int, data: bytes, kind: str, *, slow: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Docker-Content-Digest", digest(data))
        self.end_headers()
        pieces = 600 if slow else 1
        if self.command == "GET":
            for number in range(pieces):
                self.wfile.write(data[len(data) * number // pieces : len(data) * (number + 1) // pieces])
                time.sleep(0.1 if slow else 0)

    def log_message(self, *_: object) -> None:
        """Quiet."""


if __name__ == "__main__":
    raise_loopback()
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Registry)
    Path(sys.argv[2]).touch()
    server.serve_forever()
