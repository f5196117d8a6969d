"""What pages may have runs and other programs do: control files, the playground, and replay.

Nothing here is reachable without ``sfumato studio --control``. A run looks into its folder ``control/`` between two
steps; the studio writes there and nowhere else. Checkpoints are loaded by other processes, which end with the studio.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from sfumato.config.characters import printable
from sfumato.config.file_checks import path_inside
from sfumato.config.trust import SWITCH
from sfumato.config.writing import write_atomically
from sfumato.errors import ConfigError, DataError
from sfumato.evaluation.questions import NAMES, parse_question
from sfumato.serving.requests import RefusedRequestError, check_media_type, read_body
from sfumato.studio.model_process import MOST_LINE, PlaygroundProcess, end_process, end_with_parent
from sfumato.studio.requests import find_run, find_sample, json_response, parse_body, text_parameter
from sfumato.studio.runs import RunReader, RunsFolder, read_text
from sfumato.studio.secrets import hide_in_text
from sfumato.studio.tail import LineTail, Record
from sfumato.tracking.control_files import ANSWERS, COMMANDS, FOLDER, MOST_CHARACTERS, MOST_PROMPTS, WATCHED
from sfumato.tracking.json_lines import is_step

MOST_BODY_BYTES = 2**16 + 2**10
NEWEST_ANSWERS = 50
"""Answers of the run that a page shows, the newest."""
REPLAY_S = 900.0
"""How long a sample may take to be made again."""
MADE_TYPES = {".png": "image/png", ".webp": "image/webp", ".wav": "audio/wav"}
"""Media types of what replay and the playground make, by suffix."""
MOST_PICTURES = 1000
"""Pictures and sounds of replay and of the playground that are kept for pages, the newest."""
KINDS = ("eval", "train", "watched")


class Control:
    """The answers to what pages want done.

    Args:
        runs: the runs below the studio's folder.
        may_control: whether pages may change runs; loading checkpoints is part of it, since it takes memory.
        trusts_code: whether code that the configurations of runs name is run where their checkpoints are loaded.
    """

    def __init__(self, runs: RunsFolder, may_control: bool, trusts_code: bool = False) -> None:
        self.runs = runs
        self.may_control = may_control
        self._trust = (SWITCH,) if trusts_code else ()
        self.outputs = Path(tempfile.mkdtemp(prefix="sfumato-studio-")) if may_control else None
        """Where replay and the playground write."""
        self._playground: PlaygroundProcess | None = None
        self._loading = asyncio.Lock()
        """One checkpoint is in memory at a time."""
        self._files: dict[str, Path] = {}

    def routes(self) -> tuple[Route, ...]:
        """Addresses; without control only the one that says so."""
        settings = Route("/api/settings", self.settings)
        if not self.may_control:
            return (settings,)
        return (
            settings,
            Route("/api/control", self.answers, methods=["GET"]),
            Route("/api/control", self.control, methods=["POST"]),
            Route("/api/watched", self.watch, methods=["POST"]),
            Route("/api/playground", self.play, methods=["POST"]),
            Route("/api/playground/end", self.end_playground, methods=["POST"]),
            Route("/api/replay", self.replay, methods=["POST"]),
            Route("/made", self.made),
        )

    async def settings(self, request: Request) -> Response:
        """What pages may offer."""
        can_load = {name: self.may_control and _has_command(name) for name in ("replay", "playground")}
        return json_response({"control": self.may_control, **can_load})

    async def control(self, request: Request) -> Response:
        """Asks a run for something: it answers in control.jsonl when it has come to the end of its step."""
        value = await _read_json(request, "run", "command")
        command = value.get("command")
        if command not in COMMANDS:
            raise RefusedRequestError(400, f"command must be one of {', '.join(COMMANDS)}")
        reader = self._run(value)
        if not reader.state(reader.environment()).is_alive:
            raise RefusedRequestError(409, "no process of this run is at work, so nobody would read the command")
        name = f"studio-{secrets.token_hex(6)}"
        content = json.dumps({"command": command}).encode()
        await run_in_threadpool(_write_control, reader, f"{name}.json", content)
        return json_response({"id": name})

    async def answers(self, request: Request) -> Response:
        """What the run has answered, and the watched prompts."""
        reader = find_run(self.runs, text_parameter(request, "run"))
        return json_response(await run_in_threadpool(_read_answers, reader))

    async def watch(self, request: Request) -> Response:
        """Has the run draw other prompts beside its evaluation, from the next time on."""
        value = await _read_json(request, "run", "prompts")
        prompts = value.get("prompts")
        if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
            raise RefusedRequestError(400, "prompts must be a list of texts")
        lines = [" ".join(prompt.split()) for prompt in prompts]
        lines = [line for line in lines if line]
        if len(lines) > MOST_PROMPTS or any(len(line) > MOST_CHARACTERS for line in lines):
            raise RefusedRequestError(
                400, f"at most {MOST_PROMPTS} prompts of {MOST_CHARACTERS} letters can be watched"
            )
        if any(line.startswith("#") for line in lines):
            raise RefusedRequestError(400, "a prompt must not begin with #, which marks a comment in the run's file")
        content = "".join(f"{line}\n" for line in lines).encode("utf-8", errors="replace")
        await run_in_threadpool(_write_control, self._run(value), WATCHED, content)
        return json_response({"prompts": lines})

    async def replay(self, request: Request) -> Response:
        """Makes a sample again from its checkpoint, in a process of its own, and says what differs."""
        value = await _read_json(request, "run", "step", "kind", "id")
        reader = self._run(value)
        step = value.get("step")
        sample_id = value.get("id")
        kind = value.get("kind")
        if not is_step(step) or not is_step(sample_id) or not isinstance(kind, str) or kind not in KINDS:
            raise RefusedRequestError(400, "step and id must be whole numbers, and kind one of " + ", ".join(KINDS))
        find_sample(reader, step, kind, sample_id)
        sample = ("--step", str(step), "--sample", str(sample_id), "--kind", kind)
        async with self._reserve_model():
            await self._end_playground()  # two models need not fit into memory
            return json_response(await self._replay(reader, sample))

    async def _replay(self, reader: RunReader, sample: tuple[str, ...]) -> dict[str, object]:
        assert self.outputs is not None
        out = tempfile.mkdtemp(dir=self.outputs)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sfumato.cli", "replay", str(reader.folder), *sample, "--json", "--out", out),
            *self._trust,
            stdin=asyncio.subprocess.DEVNULL,
            preexec_fn=end_with_parent,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=MOST_LINE,
        )
        try:
            output, messages = await asyncio.wait_for(process.communicate(), REPLAY_S)
        except TimeoutError as error:
            raise RefusedRequestError(504, f"making the sample again took longer than {REPLAY_S:.0f} s") from error
        finally:
            await end_process(process)
        try:
            result = json.loads(output.splitlines()[-1])
        except (ValueError, IndexError) as error:
            raise RefusedRequestError(500, f"the sample was not made again: {_last_words(messages)}") from error
        file = result.pop("file", None)
        if isinstance(file, str) and Path(file).suffix in (".png", ".webp") and Path(file).is_file():
            result["picture"] = self._playground_address(Path(file))
        return {str(name): _clean_value(item) for name, item in result.items()}

    async def play(self, request: Request) -> Response:
        """Has a checkpoint, or all of them, answer a prompt. The process that holds the model stays for the next."""
        value = await _read_json(request, "run", *NAMES)
        reader = self._run(value)
        question = {name: value[name] for name in NAMES if value.get(name) is not None}
        try:
            parse_question(question)
        except ConfigError as error:
            raise RefusedRequestError(400, str(error)) from error
        async with self._reserve_model():
            if self._playground is None or not self._playground.serves(reader):
                await self._end_playground()
                assert self.outputs is not None
                out = Path(tempfile.mkdtemp(dir=self.outputs))
                self._playground = await PlaygroundProcess.start(reader, out, self._trust)
            try:
                answers, state = await self._playground.ask(question)
            except BaseException:
                await self._end_playground()
                raise
        for answer in answers:
            file = answer.pop("file", None)
            if not isinstance(file, str) or not file:
                continue
            # a video has its sound beside it, and a sound the picture of its spectrum
            path = Path(file)
            parts = {"picture": path, "sound": path.with_suffix(".wav")}
            if path.suffix == ".wav":
                parts = {"spectrum": path.with_suffix(".png"), "sound": path}
            answer |= {name: self._playground_address(part) for name, part in parts.items() if part.is_file()}
        return json_response({"answers": [_clean_value(answer) for answer in answers], "memory": state.get("memory")})

    async def end_playground(self, request: Request) -> Response:
        """Frees the memory that the playground's model takes; an answer that it is computing is not waited for."""
        await _read_json(request)
        if self._playground is None:  # it is being started, or a replay is at work
            async with self._reserve_model():
                pass
        await self._end_playground()
        return json_response({})

    async def made(self, request: Request) -> Response:
        """A picture or a sound that replay or the playground has made."""
        path = self._files.get(text_parameter(request, "name"))
        if path is None or path.is_symlink() or not path.is_file():
            raise RefusedRequestError(404, "this file is not there any more")
        return FileResponse(path, media_type=MADE_TYPES[path.suffix])

    async def close(self) -> None:
        """Ends the playground, and removes what it and replay have written."""
        await self._end_playground()
        if self.outputs is not None:
            shutil.rmtree(self.outputs, ignore_errors=True)

    async def _end_playground(self) -> None:
        if self._playground is not None:
            playground = self._playground
            self._playground = None
            await playground.close()

    def _playground_address(self, path: Path) -> str:
        name = secrets.token_urlsafe(16)
        self._files[name] = path
        while len(self._files) > MOST_PICTURES:
            with contextlib.suppress(OSError):
                self._files.pop(next(iter(self._files))).unlink()
        return f"/made?name={name}"

    @contextlib.asynccontextmanager
    async def _reserve_model(self):
        """One process that holds a model at a time. Raises RefusedRequestError (429) while another one is at work."""
        if self._loading.locked():
            raise RefusedRequestError(
                429, "another checkpoint is at work: wait until it is done, or free the playground's memory"
            )
        async with self._loading:
            yield

    def _run(self, value: dict[str, object]) -> RunReader:
        name = value.get("run")
        if not isinstance(name, str):
            raise RefusedRequestError(400, "run must be the name of a run")
        return find_run(self.runs, name)


def _has_command(name: str) -> bool:
    """Whether this installation has a command that loads checkpoints."""
    return importlib.util.find_spec(f"sfumato.commands.{name}") is not None


async def _read_json(request: Request, *names: str) -> dict[str, object]:
    check_media_type(request, "application/json")
    too_large = f"a request has at most {MOST_BODY_BYTES:,} bytes"
    return parse_body(await read_body(request, MOST_BODY_BYTES, too_large, 10.0), frozenset(names))


def _write_control(reader: RunReader, name: str, content: bytes) -> None:
    """Writes a file into the run's control folder, which is made; the run sees all of it or nothing."""
    folder = reader.folder / FOLDER
    try:
        folder.mkdir(exist_ok=True)
        if folder.is_symlink() or path_inside(reader.folder, FOLDER) != folder.resolve():
            raise DataError(f"{folder} is a link: remove it")
        write_atomically(folder / name, content)
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror}") from error


def _read_answers(reader: RunReader) -> dict[str, object]:
    answers: list[Record] = []
    LineTail(reader.folder / ANSWERS).read_new(answers.clear, answers.extend)
    waiting = sorted(path.stem for path in (reader.folder / FOLDER).glob("studio-*.json"))
    prompts = read_text(reader.folder / FOLDER, WATCHED).splitlines()
    prompts = [line for line in prompts if line.strip() and not line.startswith("#")]
    return {
        "answers": _clean_value(answers[-NEWEST_ANSWERS:]),
        "waiting": waiting,
        "prompts": [printable(line) for line in prompts],
    }


def _clean_value(value: object) -> object:
    """A value with texts that do nothing to what shows them, and without secrets."""
    if isinstance(value, str):
        return printable(hide_in_text(value[:20_000]))
    if isinstance(value, dict):
        return {str(name): _clean_value(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_clean_value(item) for item in value[:1000]]
    return value


def _last_words(messages: bytes) -> str:
    lines = [line for line in messages.decode("utf-8", errors="replace").splitlines() if line.strip()]
    return printable(hide_in_text(lines[-1][:400])) if lines else "its process said nothing"
