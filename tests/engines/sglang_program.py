"""The server of ``sglang_protocol.py`` as a program of its own, which a run starts as it would SGLang's; it may fail.

``SERVER_FAULT`` is what happens to it and before the how-manieth answer, ``SERVER_FAULT_ONCE`` a file that says that it
has happened: without one it happens each time.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.engines.sglang_protocol import Handler, Scheduler, bound
from tests.tiny import ROOT

torch.set_num_threads(1)


class FaultyHandler(Handler):
    """Answers until its time has come."""

    num_answers = 0

    def answer(self, body: Any) -> None:
        fault, _, after = os.environ.get("SERVER_FAULT", "").partition(":")
        if fault and self.path == "/generate" and body.get("logprob_start_len") != 0:
            FaultyHandler.num_answers += 1
            if FaultyHandler.num_answers == int(after) and self._happens():
                if fault == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault == "hangs":
                    time.sleep(600)
                self.scheduler.faults.add(fault)
        super().answer(body)

    def _happens(self) -> bool:
        once = os.environ.get("SERVER_FAULT_ONCE")
        if once is None:
            return True
        try:
            Path(once).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def engine_settings(tmp_path: Path, fault: str = "", once: bool = True, **more: Any) -> dict[str, Any]:
    """``rollout.engine`` of a run that starts this program."""
    package = tmp_path / "program" / "sglang"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text("from tests.engines.sglang_program import main\n\nmain()\n")
    environment = {"PYTHONPATH": f"{package.parent}:{ROOT}"}
    if fault:
        environment |= {"SERVER_FAULT": fault} | ({"SERVER_FAULT_ONCE": str(tmp_path / "happened")} if once else {})
    settings = {"type": "sglang", "program": sys.executable, "environment": environment, "dtype": "float32"}
    return {**settings, "max_model_len": 256, **more}


def main() -> None:
    """Serves until it is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", type=Path)
    parser.add_argument("--port", type=int)
    options, _ = parser.parse_known_args()
    module = AutoModelForCausalLM.from_pretrained(options.model_path, dtype=torch.float32).eval()
    bound(Scheduler(options.model_path, set(), module), options.port, FaultyHandler).serve_forever()
