"""What a run says before it draws for nothing: signatures of reward functions, a JSON service, texts that differ."""

import json
import math
import re
import threading
from http.server import HTTPServer
from pathlib import Path

import numpy as np
import pytest

from sfumato.config.load import load_config
from sfumato.config.text import TrainTextConfig
from sfumato.errors import ConfigError, RewardError
from sfumato.rewards.base import Failure, Sample
from sfumato.rewards.function import FunctionReward
from sfumato.rewards.json_service import JsonServiceReward, decode_scores, encode_sample
from sfumato.rewards.scoring.scorer import Scorer
from sfumato.tracking.folder import _shorten_pair
from sfumato.tracking.progress import digits_after_point, format_value
from tests.page_commands import FENCE, ROOT
from tests.tiny import run_task_here, tiny_rl_config, tiny_text_config

TEXTS = [Sample(prompt="p", group_id=0, text=text, metadata={"answer": "4"}) for text in ("a", "bc")]
PICTURES = [Sample(prompt="p", group_id=0, image=np.full((2, 3, 3), value, np.uint8)) for value in (10, 20)]

SOURCE = """
import functools

import torch


def flow(images, prompts, metadata):
    return [float(image.mean()) for image in images], {}


def flow_tensors(images, prompts, metadata):
    images = (images * 255).round().clamp(0, 255).to(torch.uint8).cpu().numpy().transpose(0, 2, 3, 1)
    return [float(image.mean()) + image.shape[-1] for image in images], {}


def trl(prompts, completions, answer, **kwargs):
    return [float(len(text)) for text in completions]


def trl_ids(completion_ids, answer, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def only_values(images, prompts, metadata):
    return [float(image.mean()) for image in images]


def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(solution_str) + float(ground_truth)}


def verl_score(solution_str, ground_truth, method="strict"):
    assert method == "strict"
    return len(solution_str) + float(ground_truth)


def verl_geo3k(predict_str, ground_truth, use_boxed=True, format_score=0.1):
    return len(predict_str) + float(ground_truth) if use_boxed is True else 0.0


def factory():
    return flow


def one(sample):
    return 1.0


async def verl_async(data_source, solution_str, ground_truth, extra_info):
    return {"score": len(solution_str) + float(ground_truth)}


def areal(prompt, completions, prompt_ids, completion_ids, **kwargs):
    return 1.0


def broken(sample):
    return helper(sample)


def helper(sample):
    raise KeyError("gone")


def with_default(sample, scale=2.0):
    return scale


wrapped = functools.wraps(one)(lambda *arguments: one(*arguments))
"""


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize(
    ("name", "samples", "values"),
    [
        ("flow", PICTURES, [10.0, 20.0]),
        ("only_values", PICTURES, [10.0, 20.0]),
        ("flow_tensors", PICTURES, [13.0, 23.0]),
        ("trl", TEXTS, [1.0, 2.0]),
        ("verl", TEXTS, [5.0, 6.0]),
        ("verl_async", TEXTS, [5.0, 6.0]),
        ("verl_score", TEXTS, [5.0, 6.0]),
        ("verl_geo3k", TEXTS, [5.0, 6.0]),
    ],
)
def test_the_lines_that_the_refusal_of_anothers_function_gives_call_it(source, tmp_path, name, samples, values):
    with pytest.raises(ConfigError, match=r"is a function of (flow_grpo|TRL|verl)") as error:
        FunctionReward(path=f"{source}:{name}").prepare()
    assert f"{source}:{SOURCE[: SOURCE.index(f'def {name}(')].count(chr(10)) + 1}" in str(error.value)
    lines = str(error.value).partition("\n")[2]
    if name == "flow_tensors":
        lines = lines.replace("# for a function of tensors: ", "")
    mended = tmp_path / "mended.py"
    mended.write_text(f"{SOURCE}\n\n{lines}\n")
    reward = FunctionReward(path=f"{mended}:score", groupwise="groupwise: true" in str(error.value), process=False)
    reward.prepare()
    assert list(reward.score(samples)) == values


def test_a_function_that_cannot_be_called_with_a_sample_is_refused(source):
    with pytest.raises(ConfigError, match=r"must take one argument, a Sample, and is factory\(\): too many"):
        FunctionReward(path=f"{source}:factory").prepare()
    with pytest.raises(ConfigError, match=r"must take one argument, a Sample, and is areal\(prompt, "):
        FunctionReward(path=f"{source}:areal").prepare()
    with pytest.raises(ConfigError, match="takes token ids, which rewards do not see"):
        FunctionReward(path=f"{source}:trl_ids").prepare()
    with pytest.raises(ConfigError, match="no async function"):
        FunctionReward(path=f"{source}:one", concurrency=2).prepare()
    for name in ("one", "with_default", "wrapped"):
        FunctionReward(path=f"{source}:{name}").prepare()


def test_failures_name_the_users_file_and_line(source, tmp_path):
    scores = Scorer([FunctionReward(path=f"{source}:broken", process=False)]).score(TEXTS)
    (failure,) = scores.failures
    assert re.search(rf"KeyError: 'gone' \(at {source}:{SOURCE[: SOURCE.index('raise')].count(chr(10)) + 1}\)", failure)
    bad = tmp_path / "bad.py"
    bad.write_text("x = 1\ny = nothing\n")
    with pytest.raises(ConfigError, match=rf"NameError: .* \(at {bad}:2\)"):
        FunctionReward(path=f"{bad}:f").prepare()


def test_a_first_evaluation_that_fails_as_a_whole_stops_the_run(source, tmp_path):
    broken = {"type": "function", "path": f"{source}:broken", "process": False}
    config = tiny_rl_config(tmp_path, reward={"rewards": [broken], "max_failed_fraction": 0.5})
    with pytest.raises(RewardError, match=r"no value for any of the \d+ samples of the first evaluation.*mine\.py:"):
        run_task_here("rl_diffusion", config)


@pytest.fixture
def service():
    """The service of docs/rewards.md, on a port of its own."""
    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    (text,) = [text for _, text in FENCE.findall(page) if text.startswith("# service.py")]
    namespace = {"__name__": "service"}
    exec(text, namespace)
    namespace["Service"].log_message = lambda *_: None
    server = HTTPServer(("127.0.0.1", 0), namespace["Service"])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_service_of_the_page_gives_rewards(service):
    reward = JsonServiceReward(base_urls=(service,), allow_private=True, batch_size=1, retry_for_s=1.0)
    reward.prepare()
    assert list(reward.score(TEXTS)) == [0.01, 0.02]
    scores = Scorer([reward]).score(PICTURES)  # which the service of the page does not know
    assert all(map(math.isnan, scores.total)) and "http" in scores.failures[0]


def test_what_is_sent_and_read():
    sent = json.loads(json.dumps(encode_sample(PICTURES[0])))
    assert set(sent) == {"prompt", "metadata", "image"} and encode_sample(TEXTS[0])["metadata"] == {"answer": "4"}
    vast = 10**400  # has no value, and costs the others none
    given = f'{{"scores": [1, null, {vast}]}}'.encode()
    assert decode_scores(given, 3) == [1.0, Failure("the service gave null"), vast]
    for wrong in (b"no", b'{"scores": [1]}', b"[1, 2]", b'{"scores": [1, "2"]}', b'{"scores": [true, 1]}'):
        with pytest.raises(Exception, match=r"answer|score"):
            decode_scores(wrong, 2)
    with pytest.raises(ConfigError, match="url_path"):
        JsonServiceReward(base_urls=("http://a.example",), url_path="score")


def test_long_texts_are_shown_where_they_differ():
    before, after = _shorten_pair("/data/" + "a" * 60 + "/one.jsonl", "/data/" + "a" * 60 + "/two.jsonl")
    assert before != after and "one" in before and "two" in after and before.startswith("...")
    assert _shorten_pair(1, "x") == ("1", '"x"')
    before, after = _shorten_pair("a" * 90, "a" * 91)
    assert before != after


def test_small_numbers_keep_their_digits():
    assert format_value(0.000345) == "3.45e-04" and format_value(1e-3) == "1.0e-03"
    assert (
        digits_after_point(0.00041, 0.00052) == 6
        and digits_after_point(12.0, 0.5) == 3
        and digits_after_point(0.0) == 3
    )


def test_how_often_nothing_is_evaluated_is_no_mistake(tmp_path):
    Path(tmp_path / "t.jsonl").write_text("{}\n")
    data = {"synthetic": None, "train_path": str(tmp_path / "t.jsonl")}
    overrides = tiny_text_config(tmp_path, data=data)
    overrides["eval"] = {"every_steps": 5}
    assert load_config(TrainTextConfig, overrides=overrides).eval.every_steps == 5
