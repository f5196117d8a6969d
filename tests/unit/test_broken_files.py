"""Files and messages of strangers that once ended in an error without a name: found by ``python -m tests.fuzz``."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sfumato.checkpoint.parts import StoredCheckpoint, read_state_values
from sfumato.config.sections import ModelConfig, ParamGroupConfig
from sfumato.config.text import LanguageModelConfig
from sfumato.data.files.row_store import RowStore, RowWriter
from sfumato.data.media import video_files
from sfumato.data.media.cache import _read_index
from sfumato.data.media.videos import check_video, read_frames
from sfumato.data.text.chat import build_chat_template
from sfumato.data.text.template_limits import TemplateLimitError, check_constants
from sfumato.errors import CheckpointError, ConfigError, DataError
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.models.language.load import build_byte_tokenizer, build_tokenizer, read_model_config
from sfumato.rewards.answers import Format
from sfumato.rollout.agents.tool_calls import inline_call
from sfumato.rollout.engines.base import EngineError
from sfumato.rollout.engines.served.vllm_calls import ServerCalls
from sfumato.tracking.curves import curve_svg
from tests.tiny import tiny_language_description, write_tiny_pipeline
from tests.tiny_vision import clip

DEEP = "[" * 100_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer with the configuration of a model."""
    build_byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_language_description("llama")))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tokenizer.json", {"truncation": 1}),
        ("tokenizer.json", {"version": "256000000000.0"}),
        ("tokenizer.json", {"model": None}),
        ("tokenizer_config.json", {"tokenizer_class": 5}),
        ("tokenizer_config.json", {"model_max_length": "many"}),
        ("tokenizer_config.json", DEEP),
        ("config.json", {"hidden_size": "large"}),
        ("config.json", {"num_attention_heads": [4]}),
        ("config.json", {"tie_word_embeddings": 3}),
        ("config.json", {"num_hidden_layers": 2**31}),
        ("config.json", {"num_hidden_layers": 10**400}),
        ("config.json", {"text_config": {"num_experts": 1e300}}),
        ("config.json", DEEP),
        ("config.json", "[1, 2]"),
    ],
)
def test_a_broken_file_of_a_model_folder_is_named(folder: Path, name: str, change: Any) -> None:
    content = change if isinstance(change, str) else json.dumps(json.loads((folder / name).read_text()) | change)
    (folder / name).write_text(content)
    config = LanguageModelConfig(model_path=str(folder))
    read = read_model_config if name == "config.json" else build_tokenizer
    with pytest.raises(ConfigError, match=str(folder)) as raised:
        read(config)
    assert len(str(raised.value)) < 2000


@pytest.mark.parametrize(
    "entry",
    [["diffusers"] * 100, ["diffusers", 3], ["diffusers"], [], ["x" * 5000, "y"], ["a", {"b": 1}], ["../a", "b"]],
)
def test_a_part_of_a_pipeline_that_is_no_library_and_class_is_named(tmp_path: Path, entry: list[Any]) -> None:
    folder = write_tiny_pipeline(tmp_path / "pipe")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"vae": entry}))
    with pytest.raises(ConfigError, match="vae"):
        build_diffusion_model(ModelConfig(model_path=str(folder), max_sequence_length=7))


@pytest.mark.parametrize("index", [{"n" * 5000: ["diffusers", "A"]}, {"../vae": ["diffusers", "A"]}, [1], DEEP])
def test_a_broken_index_of_a_pipeline_is_named(tmp_path: Path, index: Any) -> None:
    folder = write_tiny_pipeline(tmp_path / "pipe")
    if isinstance(index, dict):
        index = json.loads((folder / "model_index.json").read_text()) | index
    (folder / "model_index.json").write_text(index if isinstance(index, str) else json.dumps(index))
    with pytest.raises(ConfigError, match=str(folder)):
        build_diffusion_model(ModelConfig(model_path=str(folder), max_sequence_length=7))


def test_a_scheduler_larger_than_the_memory_is_named(tmp_path: Path) -> None:
    folder = write_tiny_pipeline(tmp_path / "pipe")
    file = folder / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_train_timesteps": 10**15}))
    with pytest.raises(ConfigError, match="larger than the memory"):
        build_diffusion_model(ModelConfig(model_path=str(folder), max_sequence_length=7))


@pytest.mark.parametrize("text", ["{% for i in range(10 ** 30) %}{% endfor %}", "{{ 1e999 * 1 }}", "{{ 1 // 0 }}"])
def test_a_template_whose_expressions_fail_is_named(text: str) -> None:
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = text
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises((ConfigError, DataError), match="template"):
        build_chat_template(None, tokenizer).render(messages, "a.jsonl, row 3")


def test_a_long_word_before_a_parenthesis_takes_no_time() -> None:
    assert inline_call("a" * 3_000_000 + "(1)=") == ("a" * 100, "1")
    assert inline_call("so 9calculate(1+(2))=") == ("calculate", "1+(2)")
    assert inline_call("9(1)=") is None


def test_a_number_beyond_all_axes_is_left_out_of_its_curve() -> None:
    assert "<svg" in curve_svg("loss", {1: 1e308, 2: 0.5, 3: -1e308})
    assert "<svg" in curve_svg("loss", {1: 1e308})


def test_a_lower_limit_of_the_machine_stays() -> None:
    code = (
        "import resource\n"
        "from sfumato.config.process_limits import lower_limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))\n"
        "lower_limit(resource.RLIMIT_NOFILE, 200)\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (100, 100)\n"
        "lower_limit(resource.RLIMIT_NOFILE, 50)\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (50, 50)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_number_of_a_template_that_python_does_not_read_is_refused() -> None:
    with pytest.raises(TemplateLimitError, match="digits"):
        check_constants("{{ " + "9" * 5000 + " }}", ImmutableSandboxedEnvironment())


@pytest.mark.parametrize("identity", [1, "a", [1], True])
def test_an_identity_of_a_checkpoint_that_is_no_mapping_is_named(tmp_path: Path, identity: Any) -> None:
    values: dict[str, Any] = {key: {} for key in ("policy_updates", "optimizer", "random", "data")}
    path = tmp_path / "state.json"
    path.write_text(json.dumps(values | {"step": 1, "model": "m", "schedule_steps": 1}))
    assert read_state_values(path)["step"] == 1
    path.write_text(json.dumps(values | {"step": 1, "model": "m", "schedule_steps": 1, "identity": identity}))
    with pytest.raises(CheckpointError, match="identity is"):
        read_state_values(path)


def test_values_of_a_checkpoint_that_are_no_mapping_are_named(tmp_path: Path) -> None:
    stored = StoredCheckpoint.__new__(StoredCheckpoint)
    stored.folder, stored.values, stored.tensors = tmp_path, {"optimizer": 5}, {}
    with pytest.raises(CheckpointError, match=r"state\.json: optimizer holds no mapping"):
        stored.optimizer_keys()


@pytest.mark.parametrize(
    "specs",
    [
        {"latents": {"dtype": "float32"}},
        {"latents": {"shape": [2]}},
        {"latents": {"shape": [2], "dtype": "floa32"}},
        {"latents": {"shape": [2], "dtype": "load"}},
        {"latents": {"shape": [2.5], "dtype": "float32"}},
        {"latents": {"shape": [-2], "dtype": "float32"}},
        {"latents": {"shape": 3, "dtype": "float32"}},
        {"latents": 3},
        {"latents": "text"},
        {"../latents": {"shape": [2], "dtype": "float32"}},
        {"x" * 5000: {"shape": [2], "dtype": "float32"}, "y": 1},
        [1],
        3,
        DEEP,
    ],
)
def test_a_damaged_description_of_a_store_is_named(tmp_path: Path, specs: Any) -> None:
    RowWriter(RowStore(tmp_path, "store")).append([b"k" * 16], {"latents": torch.zeros(1, 2)})
    assert len(RowStore(tmp_path, "store")) == 1
    (tmp_path / "tensors.json").write_text(specs if isinstance(specs, str) else json.dumps(specs))
    with pytest.raises(DataError, match="damaged store"):
        RowStore(tmp_path, "store")


@pytest.mark.parametrize(
    "head", [b"{'descr': (", b"\n", b"(" * 4000, b"{'descr': [('key', 'V16')], 'shape': (9**99,)}"]
)
def test_a_damaged_index_of_media_is_named(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "index.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head)
    with pytest.raises(DataError, match="damaged media cache"):
        _read_index(path)


ANSWERS = [
    {},
    {"prompt_logprobs": 5},
    {"prompt_logprobs": [None, {"7": {"logprob": -1.0}}]},
    {"prompt_logprobs": [None, {"6": {"logprob": "much"}}]},
    {"prompt_logprobs": [None, {"6": 3.0}]},
    {"prompt_logprobs": [None, 3]},
    {"prompt_logprobs": [None]},
    {"prompt_logprobs": [None, {"6": {"logprob": 10**400}}]},
    [1],
    "text",
]


@pytest.mark.parametrize("answer", ANSWERS, ids=str)
def test_log_probs_that_an_engine_gives_otherwise_are_its_error(answer: Any) -> None:
    calls = ServerCalls.__new__(ServerCalls)
    calls.name, calls.http = "vllm", SimpleNamespace(ask=lambda *_: answer)
    with pytest.raises(EngineError, match="vllm answered in a way that is not known"):
        calls.score([5, 6], {}, None)


@pytest.mark.parametrize(
    "choice", [{"logprobs": 3, "weight_versions": []}, 3, [], {"logprobs": {"content": 3}}], ids=str
)
def test_tokens_that_an_engine_gives_otherwise_are_its_error(choice: Any) -> None:
    async def ask_async(*_: Any) -> Any:
        return {"choices": [choice]}

    calls = ServerCalls.__new__(ServerCalls)
    calls.name, calls.http = "vllm", SimpleNamespace(ask_async=ask_async)
    with pytest.raises(EngineError, match="vllm answered in a way that is not known"):
        asyncio.run(calls.generate([1], {}, None))


def test_a_video_that_ends_its_reader_is_named_and_the_next_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cv2")
    video, examine = clip(16, 16, 4), video_files._Examiner.examine

    def crash(examiner: Any, *request: Any) -> Any:
        examiner._process.kill()
        return examine(examiner, *request)

    monkeypatch.setattr(video_files._Examiner, "examine", crash)
    for read in (lambda: check_video(video, "a.jsonl, line 3"), lambda: read_frames(video, 2, "a.jsonl, line 3")):
        with pytest.raises(DataError, match=r"a\.jsonl, line 3: broken video \(its bytes\): it ends its reader"):
            read()
    monkeypatch.undo()
    assert len(read_frames(video, 2, "row 1")) == 2


def test_a_video_whose_first_pass_takes_too_long_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cv2")
    examine = video_files._Examiner.examine

    def stop(examiner: Any, *request: Any) -> Any:
        examiner._process.send_signal(signal.SIGSTOP)
        return examine(examiner, *request)

    monkeypatch.setattr(video_files._Examiner, "examine", stop)
    monkeypatch.setattr(video_files, "LONGEST_S", 0.2)
    with pytest.raises(DataError, match="reading it takes more than 0 s"):
        check_video(clip(16, 16, 4), "row 1")


@pytest.mark.parametrize(
    "pattern", ["(" * 5000 + ")" * 5000, "x{99999999999}", "(", "[z-a]"], ids=["deep", "often", "open", "range"]
)
def test_what_is_no_regular_expression_is_named(pattern: str) -> None:
    """Parentheses 5,000 deep end the reader of Python's regular expressions in an error that is none of its own."""
    with pytest.raises(ConfigError, match="no regular expression"):
        Format(pattern=pattern)
    with pytest.raises(ValueError, match="is not a regular expression"):
        ParamGroupConfig.model_validate({"match": pattern})
