"""``sfumato evaluate``: rewards with paired intervals, distances of pictures, and benchmarks of the harness."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from sfumato.cli import main
from sfumato.config.load import merge
from sfumato.errors import ConfigError
from sfumato.evaluation.evaluation_folder import print_table
from sfumato.evaluation.results import Evaluation, as_markdown
from sfumato.tracking.bootstrap import paired_bootstrap
from sfumato.tracking.json_lines import read_jsonl
from tests.tiny import run_task_here, tiny_rl_config, tiny_text_config, tiny_text_rl_config
from tests.tiny_reward_models import write_dinov2

LORA = {"model": {"lora": {"rank": 4, "alpha": 8}}, "train": {"lr": 0.05, "max_steps": 1}}


def evaluate(*arguments):
    return main(["evaluate", *map(str, arguments)])


def results_of(folder):
    return json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))


def mean_of(results, model, metric):
    return next(r["mean"] for r in results["results"] if (r["model"], r["metric"]) == (model, metric))


@pytest.fixture(scope="module")
def rl_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rl")
    settings = {"eval": {"every_steps": 1, "num_prompts": 2}}
    return run_task_here("rl_diffusion", tiny_rl_config(folder, **merge(LORA, settings)))


def test_the_means_are_those_of_the_runs_own_evaluation(rl_run, tmp_path, capsys):
    assert evaluate(rl_run, "--out", tmp_path / "out") == 0
    results = results_of(tmp_path / "out")
    metrics = {row["step"]: row for row in read_jsonl(rl_run / "metrics.jsonl")}
    for model, step in (("base", 0), ("step 1", 1)):
        assert mean_of(results, model, "brightness") == pytest.approx(
            metrics[step]["eval/reward/brightness"], abs=1e-12
        )
    (pair,) = results["differences"]
    change = metrics[1]["eval/reward/brightness"] - metrics[0]["eval/reward/brightness"]
    assert (pair["model"], pair["reference"], pair["num_pairs"]) == ("step 1", "base", 2)
    assert pair["difference"] == pytest.approx(change, abs=1e-12)
    assert pair["low"] <= pair["difference"] <= pair["high"]
    assert "brightness" in capsys.readouterr().out
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert page.count("<img") == 4 and "brightness" in page and "<script" not in page


def test_the_same_model_twice_differs_by_exactly_nothing(rl_run, tmp_path, capsys):
    names = (rl_run, rl_run / "checkpoints" / "global_step_1")
    assert evaluate(*names, "--no-base", "--samples", 2, "--json", "--out", tmp_path / "out") == 0
    (pair,) = json.loads(capsys.readouterr().out)["differences"]
    assert (pair["difference"], pair["low"], pair["high"], pair["num_pairs"]) == (0.0, 0.0, 0.0, 4)


def test_rewards_of_the_command_line_and_means_of_a_column(rl_run, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f'write "{word}"', "tag": tag} for word, tag in (("AB", "one"), ("CD", "one"), ("EF", "two"))]
    prompts.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    red = "{type: function, path: 'tests.odd_rewards:redness', name: red}"
    rewards = ("--reward", "{type: brightness, name: light}", "--reward", red)
    arguments = (rl_run, "--trust-code", "--prompts", prompts, "--out", tmp_path / "out", *rewards)
    assert evaluate(*arguments, "--by", "tag") == 0
    results = results_of(tmp_path / "out")
    by_tag = [mean_of(results, "base", f"light: {tag}") for tag in ("one", "two")]
    assert mean_of(results, "base", "light: mean over tag") == pytest.approx(sum(by_tag) / 2)
    assert mean_of(results, "base", "light") == pytest.approx((2 * by_tag[0] + by_tag[1]) / 3)
    assert {result["metric"] for result in results["results"]} >= {"light", "red", "red: one"}
    shutil.rmtree(tmp_path / "out")
    assert evaluate(*arguments, "--by", "colour") == 2
    assert "has no such column; it has tag" in capsys.readouterr().err


def test_answers_are_scored(tmp_path):
    run = run_task_here("rl_text", tiny_text_rl_config(tmp_path, train={"max_steps": 1, "lr": 0.05}))
    assert evaluate(run, "--trust-code", "--out", tmp_path / "out") == 0
    results = results_of(tmp_path / "out")
    metrics = {row["step"]: row for row in read_jsonl(run / "metrics.jsonl")}
    assert next(r["mean"] for r in results["results"] if r["model"] == "step 1") == pytest.approx(
        metrics[1]["eval/reward/total"], abs=1e-12
    )


def test_intervals_pair_prompts_and_seeds_and_leave_out_failures():
    evaluation = Evaluation(["a", "b"])
    a = {(prompt, seed): float(prompt) for prompt in range(6) for seed in (1, 2)}
    b = {key: value + (1.0 if key[1] == 1 else 2.0) for key, value in a.items()} | {(0, 1): math.nan, (9, 1): 5.0}
    evaluation.add_metric("value", {"a": a, "b": b})
    (pair,) = evaluation.differences
    differences = {key: b[key] - a[key] for key in a if key != (0, 1)}
    expected = paired_bootstrap(list(differences.values()), 0, clusters=[prompt for prompt, _ in differences])
    assert (pair.difference, pair.low, pair.high) == expected
    assert (pair.num_pairs, pair.num_unpaired) == (11, 3)
    assert evaluation.result("b", "value").num_failed == 1
    assert "| metric | a | b | b - a |" in as_markdown(evaluation)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    pytest.importorskip("torchmetrics", reason="the extra evaluation")
    folder = tmp_path_factory.mktemp("pictures")
    generator = np.random.default_rng(0)
    for name, low in (("one", 0), ("other", 128)):
        (folder / name).mkdir()
        for index in range(24):
            pixels = generator.integers(low, low + 128, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index:02d}.png")
    write_dinov2(folder / "dinov2")
    torch.jit.script(Mean()).save(str(folder / "inception.pt"))
    return folder


class Mean(torch.nn.Module):
    """The interface of StyleGAN's Inception: features of uint8 pictures."""

    def forward(self, images: torch.Tensor, return_features: bool = False) -> torch.Tensor:
        assert return_features
        return images.double().reshape(images.shape[0], 3, -1)[:, :, :4].flatten(1)


@pytest.mark.parametrize("features", ["dinov2", "inception.pt"])
def test_a_folder_is_at_no_distance_from_itself(features, pictures, tmp_path, capsys):
    options = ("--reference", pictures / "one", "--features", pictures / features, "--trust-code")
    assert evaluate(pictures / "one", pictures / "other", *options, "--out", tmp_path / "out") == 0
    results = results_of(tmp_path / "out")
    name = "fid" if features == "inception.pt" else "fd_dinov2"
    scale = mean_of(results, str(pictures / "other"), name)
    assert scale > 0 and abs(mean_of(results, str(pictures / "one"), name)) < 1e-6 * max(scale, 1)
    kid_scale = mean_of(results, str(pictures / "other"), f"kid_{name}")
    assert abs(mean_of(results, str(pictures / "one"), f"kid_{name}")) < 0.2 * kid_scale


def test_fid_is_the_distance_of_two_gaussians(pictures, tmp_path):
    from scipy.linalg import sqrtm

    options = ("--reference", pictures / "one", "--features", pictures / "inception.pt", "--trust-code")
    assert evaluate(pictures / "other", *options, "--out", tmp_path / "out") == 0
    sides = []
    for name in ("one", "other"):
        images = [np.asarray(Image.open(path)) for path in sorted((pictures / name).glob("*.png"))]
        sides.append(np.stack([i.transpose(2, 0, 1).reshape(3, -1)[:, :4].ravel() for i in images]).astype(float))
    (m1, s1), (m2, s2) = ((side.mean(0), np.cov(side, rowvar=False)) for side in sides)
    expected = ((m1 - m2) ** 2).sum() + np.trace(s1 + s2 - 2 * sqrtm(s1 @ s2).real)
    assert mean_of(results_of(tmp_path / "out"), str(pictures / "other"), "fid") == pytest.approx(expected, rel=1e-4)


def test_distances_of_what_a_run_draws(rl_run, pictures, tmp_path):
    options = ("--reference", pictures / "one", "--features", pictures / "dinov2", "--out", tmp_path / "out")
    assert evaluate(rl_run, *options) == 0
    results = results_of(tmp_path / "out")
    assert {result["metric"] for result in results["results"]} == {"fd_dinov2", "kid_fd_dinov2"}


WRONG = {
    "no such reward": (["run", "--reward", "brightnes"], "did you mean 'brightness'"),
    "a reward of texts": (["run", "--reward", "exact"], "samples of another kind (text)"),
    "a reference without features": (["run", "--reference", "."], "--features inception-2015-12-05.pt"),
    "features without a reference": (["run", "--features", "."], "--features is for --reference"),
    "an untrusted program": (["one", "--reference", "one", "--features", "inception.pt"], "--trust-code"),
    "no pictures": (["one", "--reference", "dinov2", "--features", "dinov2"], "no folder of pictures"),
    "tasks of a model that draws": (["run", "--tasks", "arc_easy"], "--tasks is for language models"),
    "tasks and rewards": (["run", "--tasks", "arc_easy", "--reward", "ocr"], "leave --reward"),
    "a limit without tasks": (["run", "--limit", "3"], "are for --tasks"),
    "a template without tasks": (["run", "--apply-chat-template"], "are for --tasks"),
    "prompts of tasks": (["run", "--tasks", "arc_easy", "--num-prompts", "3"], "of tasks --limit"),
    "a temperature of tasks": (["run", "--tasks", "arc_easy", "--temperature", "0.7"], "--temperature has no effect"),
    "a system prompt of texts": (["run", "--tasks", "arc_easy", "--system-prompt", "Hi."], "--apply-chat-template"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_evaluated_is_said(name, rl_run, pictures, tmp_path, capsys):
    words, message = WRONG[name]
    places = {"run": rl_run} | {name: pictures / name for name in ("one", "dinov2", "inception.pt")}
    assert evaluate(*(places.get(word, word) for word in words), "--out", tmp_path / "out") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


TASKS = {
    "choose": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "write": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{written}}",
        "generation_kwargs": {"until": ["\n", "e"], "max_gen_toks": 6, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
    "likely": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}],
    },
}


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory):
    """A folder with tasks of the harness, their data, and a model of transformers."""
    pytest.importorskip("lm_eval", reason="the extra evaluation")
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {"question": f"reverse {word}", "choices": [" " + word, " " + word[::-1]], "answer": 1, "written": word[::-1]}
        for word in ("abc", "hello", "xy", "sfumato", "a long question of several words")
    ]
    long_text = "a text of more tokens than the model has positions " * 12
    rows.append({"question": long_text, "choices": [" a", " b"], "answer": 0, "written": "a"})
    data = folder / "rows.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    for name, task in TASKS.items():
        common = {"task": name, "dataset_path": "json", "test_split": "train", "num_fewshot": 0}
        common["dataset_kwargs"] = {"data_files": {"train": str(data)}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(common | task), encoding="utf-8")
    settings = {"train": {"max_steps": 1}, "data": {"data_type": "conversation"}}
    model = run_task_here("train_text", tiny_text_config(folder / "model", **settings)) / "hf_ckpt"
    return folder, model


def test_benchmarks_give_what_the_harness_gives_with_its_own_model(benchmark, tmp_path):
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from sfumato.evaluation.harness_model import HarnessModel
    from sfumato.evaluation.options import GenerationOptions
    from sfumato.evaluation.sources import find_sources
    from sfumato.evaluation.texts import text_models

    folder, model = benchmark
    theirs = HFLM(pretrained=str(model), device="cpu", dtype="float32", batch_size=2)
    ((_, loaded),) = text_models(find_sources([str(model)], False, print), GenerationOptions(device="cpu"))
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    runs = [
        simple_evaluate(model=lm, tasks=[*TASKS], task_manager=manager, bootstrap_iters=0)
        for lm in (theirs, HarnessModel(loaded))
    ]
    for task in TASKS:
        expected, ours = (run["results"][task] for run in runs)
        names = [name for name in expected if "," in name and "stderr" not in name]
        assert names and {name: ours[name] for name in names} == pytest.approx(
            {name: expected[name] for name in names}, rel=1e-5
        )
        for left, right in zip(runs[0]["samples"][task], runs[1]["samples"][task], strict=True):
            for (one,), (other,) in zip(left["resps"], right["resps"], strict=True):
                if isinstance(one, tuple):
                    assert other[0] == pytest.approx(one[0], abs=2e-4) and other[1] == one[1]
                elif isinstance(one, str):
                    assert other == one
                else:
                    assert other == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "temperature"),
    [
        ({"do_sample": False, "temperature": 0.0}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 20}, 0.7),
        ({"do_sample": True, "temperature": 0.0, "num_beams": 1, "repetition_penalty": 1}, 0.0),
    ],
)
def test_answers_of_benchmarks_are_drawn_as_a_task_says(settings, temperature):
    pytest.importorskip("lm_eval", reason="the extra evaluation")
    from sfumato.evaluation.harness_model import read_temperature

    assert read_temperature(settings) == temperature
    for name, value in (("num_beams", 4), ("repetition_penalty", 1.2), ("min_p", 0.1)):
        with pytest.raises(ConfigError, match=f"{name} {value}, which are not drawn here"):
            read_temperature(settings | {name: value})


def test_benchmarks_compare_models_with_intervals(benchmark, tmp_path):
    folder, model = benchmark
    options = ("--task-folder", folder, "--out", tmp_path / "out")
    assert evaluate(model, model, "--no-base", "--tasks", "choose,likely", *options) == 0
    results = results_of(tmp_path / "out")
    (pair,) = results["differences"]
    assert (pair["metric"], pair["difference"], pair["low"], pair["high"]) == ("choose acc", 0.0, 0.0, 0.0)
    assert {result["metric"] for result in results["results"]} >= {"choose acc", "likely word_perplexity"}


def test_documents_as_chats_begin_with_the_system_prompt(benchmark, monkeypatch):
    from sfumato.evaluation import harness, harness_model, sources
    from sfumato.evaluation.options import GenerationOptions
    from sfumato.evaluation.texts import text_models

    folder, model = benchmark
    texts = []
    encode = harness_model.HarnessModel.tok_encode
    monkeypatch.setattr(
        harness_model.HarnessModel,
        "tok_encode",
        lambda self, text, *args, **named: texts.append(text) or encode(self, text, *args, **named),
    )
    options = GenerationOptions(device="cpu", system_prompt="Be brief.")
    ((_, loaded),) = text_models(sources.find_sources([str(model)], False, print), options)
    harness.run_tasks(loaded, ["choose"], folder, limit=1, with_chat_template=True)
    assert texts and all("system\nBe brief." in text for text in texts)


@pytest.mark.slow  # the harness reads the files of all its tasks
def test_a_task_that_does_not_exist_is_named(benchmark, capsys):
    folder, model = benchmark
    assert evaluate(model, "--no-base", "--tasks", "choose,nonsense", "--task-folder", folder) == 2
    assert "no task 'nonsense'" in capsys.readouterr().err


def test_a_table_that_is_wider_than_a_log_is_folded_and_keeps_its_numbers(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    models = [f"a run with a long name {number}" for number in range(6)]
    evaluation = Evaluation(models)
    evaluation.add_metric("brightness", {model: {("p", 0): 0.123456, ("q", 0): 0.123456} for model in models})
    print_table(evaluation, as_json_text=False)
    assert "…" not in capsys.readouterr().out
