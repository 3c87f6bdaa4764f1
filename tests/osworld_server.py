"""OSWorld's in-VM server as its clients see it, for tests: the endpoints that are published, over a folder.

    with OsworldServer(folder) as server: server.url, server.requests

Commands run here, in `folder`. A request can be made to fail: `server.break_next("/execute", how)`.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
import threading
from collections.abc import Mapping
from email.parser import BytesParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import parse_qs

from PIL import Image

Fault = Literal["cut", "hang", "error", "gateway", "nonsense", "drip", "drip500"]
SIZE = (640, 480)


class OsworldServer(ThreadingHTTPServer):
    """`home` stands for /home/user; `windows` is title -> class."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.home = folder
        self.windows = {"Untitled - Editor": "editor.Editor"}
        self.requests: list[tuple[str, Any]] = []
        self.faults: list[tuple[str, Fault]] = []
        self.spare: dict[str, int] = {}  # path -> requests that are still answered before its faults begin
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def break_next(self, path: str, how: Fault, times: int = 1) -> None:
        self.faults += [(path, how)] * times

    def sent(self, path: str) -> list[Any]:
        return [value for asked, value in self.requests if asked == path]

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: OsworldServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._serve({})

    def do_POST(self) -> None:
        body, kind = self.rfile.read(int(self.headers["Content-Length"])), self.headers["Content-Type"]
        if kind == "application/json":
            self._serve(json.loads(body))
        elif kind.startswith("multipart/"):
            message = BytesParser().parsebytes(b"Content-Type: " + kind.encode() + b"\r\n\r\n" + body)
            leaves = [part for part in message.walk() if not part.is_multipart()]
            parts = {part.get_param("name", header="content-disposition"): part for part in leaves}
            self._serve({name: part.get_payload(decode=True) for name, part in parts.items()})
        else:
            self._serve({name: values[0] for name, values in parse_qs(body.decode()).items()})

    def _serve(self, asked: Mapping[Any, Any]) -> None:
        self.server.requests.append((self.path, dict(asked)))
        spared = self.server.spare.get(self.path, 0)
        self.server.spare[self.path] = spared - 1
        faults = [how for path, how in self.server.faults if path == self.path and spared <= 0]
        fault = faults[0] if faults else None
        if fault is not None:
            self.server.faults.remove((self.path, fault))
        if fault == "cut":
            self.connection.close()
            return
        if fault == "hang":
            self.server.over.wait(30)
            return
        if fault in ("error", "gateway"):
            self._answer(500 if fault == "error" else 502, b"broken")
            return
        if fault in ("drip", "drip500"):
            self._drip(200 if fault == "drip" else 500)
            return
        if fault == "nonsense":
            self._answer(200, b"<html>")
            return
        answer = getattr(self, "_on" + self.path.replace("/", "_"))(asked)
        self._answer(*answer)

    def _drip(self, status: int) -> None:
        """An answer that never ends and never pauses for long."""
        self.send_response(status)
        self.end_headers()
        with contextlib.suppress(OSError):  # nobody listens any more
            while not self.server.over.wait(0.05):
                self.wfile.write(b"x")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _here(self, path: str) -> Path:
        return self.server.home / path.removeprefix("/home/user").lstrip("/")

    def _on_screenshot(self, asked: Mapping[str, Any]) -> tuple[int, bytes]:
        buffer = io.BytesIO()
        Image.new("RGB", SIZE, "navy").save(buffer, "PNG")
        return 200, buffer.getvalue()

    def _on_screen_size(self, asked: Mapping[str, Any]) -> tuple[int, bytes]:
        return 200, json.dumps({"width": SIZE[0], "height": SIZE[1]}).encode()

    def _on_accessibility(self, asked: Mapping[str, Any]) -> tuple[int, bytes]:
        return 200, json.dumps({"AT": '<desktop-frame name="main"/>'}).encode()

    def _on_execute(self, asked: Mapping[str, Any]) -> tuple[int, bytes]:
        command, shell = asked["command"], asked["shell"]
        if "pyautogui" in str(command):
            return 200, json.dumps({"status": "success", "output": "", "error": "", "returncode": 0}).encode()
        try:
            done = subprocess.run(
                command, shell=shell, capture_output=True, text=True, cwd=self.server.home, timeout=10
            )
        except OSError as error:
            return 500, json.dumps({"status": "error", "message": str(error)}).encode()
        answer = {
            "status": "success",
            "output": done.stdout,
            "error": done.stderr,
            "returncode": done.returncode,
        }
        return 200, json.dumps(answer).encode()

    def _on_setup_launch(self, asked: Mapping[str, Any]) -> tuple[int, bytes]:
        found = asked["shell"] or shutil.which(asked["command"][0])
        return (200, b"launched") if found else (500, b"no such program")

    def _on_setup_upload(self, asked: Mapping[str, Any]) -> tuple[int, bytes]:
        path = self._here(asked["file_path"].decode())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(asked["file_data"])
        return 200, b"uploaded"

    def _on_file(self, asked: Mapping[str, Any]) -> tuple[int, bytes]:
        path = self._here(asked["file_path"])
        return (200, path.read_bytes()) if path.is_file() else (404, b"File not found")

    def _window(self, asked: Mapping[str, Any]) -> tuple[int, bytes]:
        named = self.server.windows.values() if asked["by_class"] else self.server.windows
        found = any(
            asked["window_name"] == n if asked["strict"] else asked["window_name"] in n for n in named
        )
        return (200, b"done") if found else (404, b"Window not found")

    _on_setup_activate_window = _on_setup_close_window = _window

    def _on_window_size(self, asked: Mapping[str, Any]) -> tuple[int, bytes]:
        found = asked["app_class_name"] in str(self.server.windows.values())
        return (200, b'{"width": 300, "height": 200}') if found else (200, b"{}")
