"""A server of the chat-completions protocol whose models look at pictures or err: ``python judge_server.py``.

The name of the model says what happens; with a number, ``reset-2``, only the first that many requests fail. Every
name counts for itself; GET /count/NAME tells how many requests came. Prints its port.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from PIL import Image

SEEN: Counter[str] = Counter()
LOCK = threading.Lock()
KEY = "sk-right"


class Handler(BaseHTTPRequestHandler):
    """Each model is a method that is given the images and the texts of the question."""

    def log_message(self, *_args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self.answer(str(SEEN[self.path.removeprefix("/count/")]).encode())

    def do_POST(self) -> None:
        self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = self.body["model"]
        with LOCK:
            SEEN[name] += 1
            seen = SEEN[name]
        assert self.path == "/v1/chat/completions", self.path
        content = self.body["messages"][-1]["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        self.texts = [part["text"] for part in parts if part["type"] == "text"]
        self.images = [decode(part["image_url"]["url"]) for part in parts if part["type"] == "image_url"]
        self.light = [float(image.mean()) / 255 for image in self.images]
        model, _, times = name.partition("-")
        if self.texts == ["Reply with the word Yes."] and model != "missing":
            getattr(self, model if model == "unlogged" else "yes_or_no")()
        elif times and seen > int(times):
            self.rate()
        else:
            getattr(self, model)()

    def answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status: int, message: str, **headers: str) -> None:
        self.answer(json.dumps({"error": {"message": message, "code": status}}).encode(), status, **headers)

    def say(self, text: str | None, finish_reason: str = "stop", logprobs: Any = None, **message: Any) -> None:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, **message},
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        self.answer(json.dumps({"id": "1", "object": "chat.completion", "choices": [choice]}).encode())

    # Models that do what they are asked

    def rate(self) -> None:
        """Says in all formats how bright the last picture is."""
        light = self.light[-1]
        self.say(f"sky (object): 1\nFinal Score: {1 + 4 * light}\nThe rubric says:\n**Score:** {1 + 9 * light}/10")

    def transcribe(self) -> None:
        """Reads text that stands in the pixels as bytes, which only lossless images keep."""
        self.say(self.images[-1].tobytes().rstrip(b"\0").decode())

    def yes_or_no(self) -> None:
        """As sure of Yes as the picture is bright, in several spellings."""
        light = self.light[-1] if self.light else 0.5
        assert (self.body.get("logprobs"), self.body.get("top_logprobs")) in ((True, 20), (None, None))
        tokens = {" Yes": 0.6 * light, "yes": 0.2 * light, "NO": 0.8 * (1 - light), "Maybe": 0.2}
        top = [{"token": token, "logprob": math.log(value), "bytes": None} for token, value in tokens.items() if value]
        self.say("Yes", "length", {"content": [{**top[0], "top_logprobs": top}]})

    def compare(self) -> None:
        """Prefers the brighter picture."""
        first, second = self.light
        self.say(f"<think>Answer: 2</think>Answer: {'tie' if first == second else 1 if first > second else 2}")

    def first(self) -> None:
        """Always prefers what it saw first."""
        self.say("<answer>Image 1 is better</answer>")

    def queasy(self) -> None:
        """Does not look at white pictures."""
        if 1.0 in self.light:
            self.say(None, refusal="I cannot look at this.")
        else:
            self.compare()

    def echo(self) -> None:
        """Says what it was asked."""
        self.say(json.dumps({**self.body, "shapes": [image.shape for image in self.images]}))

    def slow_first(self) -> None:
        """Answers bright pictures later than dark ones."""
        time.sleep(0.3 * self.light[-1])
        self.rate()

    def words(self) -> None:
        """Rates a text by its length."""
        assert not self.images and self.body["messages"][0]["content"] == self.texts[0]
        self.say(f"Score: {self.texts[0].count('good')}")

    def answer_questions(self) -> None:
        """Yes where the picture is brighter than the percentage in the question; No without one."""
        wanted = re.search(r"(\d+) %", self.texts[-1])
        assert "Answer Yes or No" in self.texts[-1], self.texts
        self.say("**Yes**, it is." if wanted and 100 * self.light[-1] > int(wanted.group(1)) else "no")

    # Models that do not

    def reset(self) -> None:
        self.close_connection = True

    def busy(self) -> None:
        self.refuse(429, "too many requests", Retry_After="0")

    def garbage(self) -> None:
        self.answer(b"\xff\xfe<html>")

    def empty(self) -> None:
        self.answer(b"{}")

    def choiceless(self) -> None:
        self.answer(b'{"choices": []}')

    def error_with_200(self) -> None:
        self.refuse(200, "upstream is down")

    def infinite(self) -> None:
        self.say("Yes", "length", {"content": [{"top_logprobs": [{"token": "Yes", "logprob": math.nan}]}]})

    def deep(self) -> None:
        self.answer(b"[" * 100_000)

    def declining(self) -> None:
        self.say(None, refusal="I cannot judge people.")

    def filtered(self) -> None:
        self.say("Final Score: 5", "content_filter")

    def cut(self) -> None:
        self.say("Final Score: 5", "length")

    def unsure(self) -> None:
        self.say(f"I would rather not say, picture of {self.light[-1]:.2f}. " + "x" * 300)

    def sometimes(self) -> None:
        """Cannot rate dark pictures."""
        self.rate() if self.light[-1] > 0.5 else self.unsure()

    def unlogged(self) -> None:
        self.say("Yes")

    def other_words(self) -> None:
        self.say("Maybe", "length", {"content": [{"top_logprobs": [{"token": "Maybe", "logprob": -0.1}]}]})

    def missing(self) -> None:
        self.refuse(404, f"The model `{self.body['model']}` does not exist.")

    def locked(self) -> None:
        if self.headers["Authorization"] == f"Bearer {KEY}":
            self.rate()
        else:
            self.refuse(401, "Incorrect API key provided")

    def overfull(self) -> None:
        self.refuse(400, "This model's maximum context length is 32 tokens. However, you requested 5000.")


def decode(url: str) -> np.ndarray:
    """The picture of a data URI."""
    head, _, data = url.partition(",")
    assert head == "data:image/png;base64", head
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data, validate=True))))


class Server(ThreadingHTTPServer):
    """Threads that do not outlive it."""

    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *about: Any) -> None:
        """A client that had enough is no error, a wrong request is."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(*about)


if __name__ == "__main__":
    with Server(("127.0.0.1", 0), Handler) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()
