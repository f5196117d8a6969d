"""Answers as an SGLang server does, in the form of its documented HTTP interface, by a tiny model of transformers.

The shapes are those of SGLang's documentation and of its sources as of autumn 2026: ``/generate`` with ``input_ids``
and ``return_logprob``, ``meta_info`` with triples of log-prob, token and text, ``finish_reason`` with a type, and
``weight_versions``.
"""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from tests.engines.served_model import MAX_LENGTH, log_probs, make_model


class Scheduler:
    """The model, and what is under way."""

    def __init__(self, model_path: Path, faults: set[str], module: nn.Module | None = None) -> None:
        self.module, self.faults, self.version = module or make_model(), faults, "default"
        self.model_path, self.lock = model_path, threading.Condition()
        self.is_paused, self.num_aborts, self.num_waiting, self.seen = False, 0, 0, []
        self.waits_after: int | None = None  # tokens, after which requests wait for the next pause

    def info(self) -> dict[str, Any]:
        return {
            "model_path": str(self.model_path),
            "context_length": MAX_LENGTH,
            "enable_deterministic_inference": "no seeds" not in self.faults,
            "enable_memory_saver": "memory saver" in self.faults,
        }

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        params = body["sampling_params"]
        tokens, drawn, spans = list(body["input_ids"]), [], []
        aborts, reason, prompt_log_probs = self.num_aborts, {"type": "length", "length": params["max_new_tokens"]}, None
        if body.get("logprob_start_len") == 0:
            scores = log_probs(self.module, torch.tensor([tokens]))[0].tolist()
            prompt_log_probs = [
                [None, tokens[0], None],
                *([s, t, None] for s, t in zip(scores, tokens[1:], strict=True)),
            ]
        while len(drawn) < params["max_new_tokens"]:
            with self.lock:
                if len(drawn) == self.waits_after:
                    self.num_waiting += 1
                    self.lock.wait_for(lambda: self.waits_after is None)
                    self.num_waiting -= 1
                self.lock.wait_for(lambda: not self.is_paused or self.num_aborts > aborts)
                if self.num_aborts > aborts:
                    reason = {"type": "abort", "message": "Abort in waiting queue"}
                    break
                token, log_prob = self.draw(tokens, params)
                tokens.append(token)
                drawn.append([log_prob, token, None])
                if not spans or spans[-1]["version"] != self.version:
                    spans.append({"version": self.version, "start": len(drawn) - 1, "end": 0})
                spans[-1]["end"] = len(drawn)
            if token in params.get("stop_token_ids", ()):
                reason = {"type": "stop", "matched": token}
                break
        meta = {"id": "1", "finish_reason": reason, "prompt_tokens": len(body["input_ids"]), "cached_tokens": 0}
        meta |= {"weight_version": self.version, "completion_tokens": len(drawn), "output_token_logprobs": drawn}
        meta |= {} if prompt_log_probs is None else {"input_token_logprobs": prompt_log_probs}
        meta |= {} if "no spans" in self.faults else {"weight_versions": spans}
        return {"text": "", "output_ids": [token for _, token, _ in drawn], "meta_info": meta}

    def draw(self, tokens: list[int], params: dict[str, Any]) -> tuple[int, float]:
        with torch.no_grad():
            scores = self.module(torch.tensor([tokens])).logits[0, -1].float()
        if not params["temperature"]:
            return int(scores.argmax()), float(scores.log_softmax(-1).max())
        scores = (scores / params["temperature"]).log_softmax(-1)
        noise = torch.Generator().manual_seed(params["sampling_seed"] * 100_003 + len(tokens))
        token = int((scores.exp() / torch.empty_like(scores).exponential_(generator=noise)).argmax())
        return token, float(scores[token])

    def update(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        if not files or "no update" in self.faults:
            return 400, {"success": False, "message": "Failed to get weights iterator", "num_paused_requests": 0}
        with self.lock:
            if "old weights" not in self.faults:
                for file in files:
                    self.module.load_state_dict(load_file(file), strict=False)
            self.version = body["weight_version"]
        message = f"Succeeded to update model weights. Weight version updated to {self.version}."
        return 200, {"success": True, "message": message, "num_paused_requests": 0}

    def pause(self, mode: str | None) -> None:
        with self.lock:
            self.is_paused, self.waits_after = mode is not None, None
            self.num_aborts += mode == "abort"
            self.lock.notify_all()


class Handler(BaseHTTPRequestHandler):
    scheduler: Scheduler

    def do_GET(self) -> None:
        self.answer(None)

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer(json.loads(data) if data else None)

    def answer(self, body: Any) -> None:
        scheduler, status, result = self.scheduler, 200, None
        scheduler.seen.append((self.path, body))
        while "hangs" in scheduler.faults:
            time.sleep(0.05)
        match self.path:
            case "/get_server_info":
                result = scheduler.info()
            case "/generate" if "out of memory" in scheduler.faults:
                status, result = 500, {"error": {"message": "CUDA out of memory"}}
            case "/generate":
                result = scheduler.generate(body)
            case "/update_weights_from_disk":
                status, result = scheduler.update(body)
            case "/pause_generation" | "/abort_request":
                scheduler.pause(body.get("mode", "abort"))
            case "/continue_generation":
                scheduler.pause(None)
            case "/flush_cache" | "/health_generate" | "/release_memory_occupation" | "/resume_memory_occupation":
                result = None
            case _:
                status, result = 404, {"detail": "Not Found"}
        data = b"" if result is None else json.dumps(result).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    """With room for as many connections at a time as a server has; Python's own would reset some of 28."""

    daemon_threads = True
    request_queue_size = 1024


def bound(scheduler: Scheduler, port: int = 0, handler: type[Handler] = Handler) -> ThreadingHTTPServer:
    """A server that is not yet listened to."""
    return Server(("127.0.0.1", port), type("Bound", (handler,), {"scheduler": scheduler}))


def serve(model_path: Path, *faults: str) -> tuple[str, Scheduler, ThreadingHTTPServer]:
    """Serves in a thread until ``shutdown``."""
    scheduler = Scheduler(model_path, set(faults))
    server = bound(scheduler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}", scheduler, server
