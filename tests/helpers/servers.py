"""A server of files that fails as servers do."""

import hashlib
import http.server
import json
import threading
import urllib.parse

MD5_HEADER = "x-amz-request-id"
"""A header of the servers whose ETag is the MD5."""


class Server(http.server.ThreadingHTTPServer):
    """Serves `files`; each path first answers as its list in `faults` says, one request after the other."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.faults: dict[str, list[str]] = {}
        self.asked: list[tuple[str, str | None]] = []  # (path, Range)
        self.ranges, self.etags, self.closing = True, True, threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{path}"

    def handle_error(self, request, client_address):
        pass


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        path = urllib.parse.urlsplit(self.path).path[1:]
        asked = self.headers.get("Range")
        self.server.asked.append((path, asked))
        faults = self.server.faults.get(path, [])
        fault = faults.pop(0) if faults else ""
        body = self.server.files.get(path)
        if body is None or fault.isdigit():
            self.send_response(int(fault) if fault.isdigit() else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        etag = f'"{hashlib.md5(body).hexdigest()}"' if self.server.etags else None
        start = 0
        if self.server.ranges and asked and self.headers.get("If-Range") == etag:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        if etag:
            self.send_header("ETag", etag)
            self.send_header(MD5_HEADER, "1")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        body = body[start:]
        if fault == "wrong":
            body = bytes(byte ^ 1 for byte in body)
        if fault in ("half", "stall"):
            body = body[: len(body) // 2]
        self.wfile.write(body)
        if fault == "stall":
            self.wfile.flush()
            self.server.closing.wait(30)
        self.close_connection = True

    def log_message(self, *arguments):
        pass


def jsonl(name: str, count: int) -> bytes:
    rows = [{"text": f"{name} {i} " + "word " * (i % 7)} for i in range(count)]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()
