"""A server that does everything wrong that a server can do: ``python faulty_server.py``.

The first part of a path says what is wrong, ``/garbage/score``. With a number, ``/reset-2/score``, only that many
requests fail, and later ones get the right answer: the mean of each picture. Every name counts for itself, also
``reset-02``; ``/count/NAME`` tells how many requests to POST /NAME/score came. Prints its port.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import socketserver
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler
from typing import Any

import msgpack
import numpy as np
from PIL import Image

GIB = 2**30
SEEN: Counter[str] = Counter()
LOCK = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    """One method per fault."""

    def log_message(self, *_args: Any) -> None:
        """Quiet."""

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except OSError:  # the client had enough
            self.close_connection = True

    def do_GET(self) -> None:
        _, fault, name = self.path.split("/")
        if fault == "count":
            self.answer(str(SEEN[name]).encode())
        else:
            served = {"brightness": {"groupwise": False, "fingerprint": "equal"}}
            self.answer(msgpack.packb({"version": 2, "rewards": served, "max_batch_size": 4, "max_request_mib": 64}))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        name = self.path.split("/")[1]
        with LOCK:
            SEEN[name] += 1
            seen = SEEN[name]
        self.samples = msgpack.unpackb(body)["samples"]
        self.right = [
            float(np.asarray(Image.open(io.BytesIO(sample["image"]))).mean()) / 255 for sample in self.samples
        ]
        fault, _, times = name.partition("-")
        if times and seen > int(times):
            self.scores(self.right)
        else:
            getattr(self, fault)()

    def answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def scores(self, values: Any, failures: Any = None, **more: Any) -> None:
        failures = [None] * len(self.samples) if failures is None else failures
        self.answer(msgpack.packb({"version": 2, "values": values, "failures": failures, **more}))

    def fine(self) -> None:
        self.scores(self.right)

    def silent(self) -> None:
        time.sleep(30)

    def reset(self) -> None:
        self.close_connection = True

    def half(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"x" * 500)
        self.close_connection = True

    def half_chunk(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"ff\r\nabc")
        self.close_connection = True

    def trickle(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "100000")
        self.end_headers()
        self.drip()

    def trickled_header(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
        self.drip()

    def drip(self) -> None:
        for _ in range(600):
            self.wfile.write(b"a")
            self.wfile.flush()
            time.sleep(0.05)

    def gibibyte(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(GIB))
        self.end_headers()
        self.pour()

    def gibibyte_in_chunks(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.pour(b"100000\r\n", b"\r\n")

    def gibibyte_unannounced(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.pour()

    def pour(self, before: bytes = b"", after: bytes = b"") -> None:
        for _ in range(1024):
            self.wfile.write(before + bytes(2**20) + after)

    def busy(self) -> None:
        self.answer(b"come back later\n", 429, Retry_After="1")

    def broken(self) -> None:
        self.answer(b"<h1>internal\x00 server error</h1>", 500)

    def unavailable(self) -> None:
        self.answer(b"", 503)

    def forbidden(self) -> None:
        self.answer(b"not you", 403)

    def redirect(self) -> None:
        self.answer(b"", 302, Location="http://169.254.169.254/latest/meta-data")

    def compressed(self) -> None:
        self.answer(b"\x1f\x8b", Content_Encoding="gzip")

    def garbage(self) -> None:
        self.answer(hashlib.sha512(b"garbage").digest() * 10)

    def empty(self) -> None:
        self.answer(b"")

    def page(self) -> None:
        self.answer(b"<html>Sign in to the hotel's network</html>")

    def not_http(self) -> None:
        self.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n")
        self.close_connection = True

    def short(self) -> None:
        self.scores(self.right[1:])

    def long(self) -> None:
        self.scores([*self.right, 1.0], [None] * (len(self.right) + 1))

    def nan(self) -> None:
        self.scores([float("nan"), *self.right[1:]])

    def infinite(self) -> None:
        self.scores([float("inf"), *self.right[1:]])

    def null(self) -> None:
        self.scores([None, *self.right[1:]])

    def named(self) -> None:
        self.scores([None, *self.right[1:]], ["the picture is upside down", *[None] * (len(self.right) - 1)])

    def texts(self) -> None:
        self.scores(["1.0"] * len(self.right))

    def truths(self) -> None:
        self.scores([True] * len(self.right))

    def one(self) -> None:
        self.scores(1.0)

    def more(self) -> None:
        self.scores(self.right, extra=1)

    def newer(self) -> None:
        self.answer(msgpack.packb({"version": 3}))

    def deep(self) -> None:
        self.answer(b"\x91" * 100_000)

    def huge_array(self) -> None:
        self.answer(b"\xdd\xff\xff\xff\xff")

    def pickled(self) -> None:
        self.answer(pickle.dumps(Bomb()))

    def pickle_inside(self) -> None:
        self.scores(msgpack.ExtType(5, pickle.dumps(Bomb())))


class Bomb:
    """Unpickling it makes a folder."""

    def __reduce__(self) -> Any:
        return os.mkdir, (sys.argv[1],)


class Server(socketserver.ThreadingTCPServer):
    """Threads that do not outlive it."""

    daemon_threads = True
    allow_reuse_address = True


if __name__ == "__main__":
    with Server(("127.0.0.1", 0), Handler) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()
