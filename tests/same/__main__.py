"""The command of ``tests.same``; see there."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.same.record import Record, compare_records, describe_cpu, record_run
from tests.same.runs import RUNS

RECORD = Path(__file__).with_name("record.json")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.same", description="Records and compares tiny runs.")
    parser.add_argument("action", choices=("write", "compare"))
    parser.add_argument("--only", default="", help="text that the names of the runs contain")
    parser.add_argument("--record", type=Path, default=RECORD, help="file of the record")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.pop("SFUMATO_TEST_DEVICE", None)
    names = [name for name in RUNS if options.only in name]
    if not names:
        parser.error(f"no run has {options.only!r} in its name; there are {', '.join(RUNS)}")
    stored = json.loads(options.record.read_text(encoding="utf-8")) if options.record.exists() else {"runs": {}}
    if options.action == "write":
        stored["cpu"] = describe_cpu()
        stored["runs"] |= {name: _record(name) for name in names}
        stored["runs"] = {name: stored["runs"][name] for name in RUNS if name in stored["runs"]}
        _write(stored, options.record)
        return 0
    same_cpu = stored["cpu"] == describe_cpu()
    print(f"recorded on {stored['cpu']}; here {describe_cpu()}: {'exact' if same_cpu else 'within a tolerance'}")
    num_different = 0
    for name in names:
        recorded = stored["runs"].get(name)
        differences = ["is not recorded"] if recorded is None else compare_records(recorded, _record(name), same_cpu)
        num_different += bool(differences)
        for difference in differences:
            print(f"DIFFERENT {name}: {difference}", flush=True)
    print(f"{len(names) - num_different} passed, {num_different} failed")
    return int(num_different > 0)


def _record(name: str) -> Record:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="same_") as folder:
        try:
            record = record_run(RUNS[name], Path(folder) / "run_of")
        except Exception as error:  # one run that fails must not hide what the others compute
            record = {
                "metrics": [{"step": -1, "error": repr(error)}],
                "weights": {},
                "files": {},
                "samples": "",
                "report": "",
            }
            print(f"FAILED {name}: {error}", flush=True)
    print(f"{time.monotonic() - started:6.1f} s  {name}", flush=True)
    return record


def _write(stored: Record, path: Path) -> None:
    """One line for each run, so that a difference of two records can be read."""
    runs = [f"{json.dumps(name)}: {json.dumps(record, sort_keys=True)}" for name, record in stored["runs"].items()]
    text = f'{{"cpu": {json.dumps(stored["cpu"])},\n"runs": {{\n' + ",\n".join(runs) + "\n}}\n"
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
