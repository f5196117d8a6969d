"""Language models from folders and descriptions; packed rows against the same samples one by one."""

import json

import pytest
import torch
import yaml
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from sfumato.config.load import load_config
from sfumato.config.text import LanguageModelConfig
from sfumato.config.text_data import TextTrainConfig
from sfumato.errors import ConfigError, MissingDependencyError
from sfumato.models.language import parts
from sfumato.models.language.load import build_byte_tokenizer, build_language_model
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import trainable_parameters
from sfumato.parallel.weights import whole_weights
from sfumato.rollout.text.greedy import answer_greedily
from tests.survey.tiny_configs import tiny_config
from tests.tiny import tiny_language_description
from tests.token_batches import LENGTHS, batch, samples

KINDS = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3")


def describe(tmp_path, kind="qwen3", **changes):
    path = tmp_path / f"{kind}.yaml"
    path.write_text(yaml.safe_dump(tiny_language_description(kind) | changes))
    return {"config_path": str(path), "tokenizer_path": "bytes"}


def build(model, **train):
    settings = {"output_dir": "unused", "num_threads": 1, **train}
    config = load_config(TextTrainConfig, overrides=settings)
    built = build_language_model(LanguageModelConfig(**model), config)
    built.parallelize(Mesh(Layout(), torch.device("cpu")), config)
    return built


def sum_of_losses(scores, batch):
    return -scores.log_probs(batch.labels).sum()


def gradients(model):
    results = {name: parameter.grad.clone() for name, parameter in trainable_parameters(model.trained).items()}
    model.trained.zero_grad()
    return results


def relative(left, right):
    return float((left - right).norm() / right.norm().clamp_min(1e-12))


@pytest.mark.parametrize("kind", KINDS)
def test_losses_of_packed_rows_are_those_of_the_samples_one_by_one(tmp_path, kind):
    packed, alone = build(describe(tmp_path, kind)), build(describe(tmp_path, kind) | {"attention": "eager"})
    sample_list = samples()
    actual = packed.token_log_probs([batch(sample_list)])[0][0].split(LENGTHS)
    for log_probs, sample in zip(actual, sample_list, strict=True):
        expected = alone.token_log_probs([batch([sample])])[0][0]
        torch.testing.assert_close(log_probs, expected, rtol=1e-6, atol=1e-6)
    total = packed.forward_backward([batch(sample_list)], sum_of_losses)[0]
    losses = alone.forward_backward([batch([sample]) for sample in sample_list], sum_of_losses)
    assert total == pytest.approx(sum(losses), rel=1e-6)
    ours, theirs = gradients(packed), gradients(alone)
    assert max(relative(ours[name], theirs[name]) for name in theirs) < 1e-5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attentions_of_transformers_see_documents_too(tmp_path, attention):
    batches = [batch(samples())]
    ours, theirs = (
        build(describe(tmp_path) | {"attention": kind_of_attention}) for kind_of_attention in ("packed", attention)
    )
    torch.testing.assert_close(ours.token_log_probs(batches), theirs.token_log_probs(batches), rtol=1e-5, atol=2e-6)


def test_padded_rows_are_the_packed_ones(tmp_path):
    model, sample_list = build(describe(tmp_path)), samples()
    packed = model.forward_backward([batch(sample_list)], sum_of_losses)[0]
    expected = gradients(model)
    assert model.forward_backward([batch(sample_list, packed=False)], sum_of_losses)[0] == pytest.approx(
        packed, rel=1e-6
    )
    actual = gradients(model)
    assert max(relative(actual[name], expected[name]) for name in expected) < 1e-5


@pytest.mark.parametrize("tied", [False, True])
def test_chunked_loss_is_the_loss(tmp_path, tied):
    source = describe(tmp_path, tie_word_embeddings=tied)
    plain, chunked = build(source), build(source, chunked_loss=True)
    batches = [batch(samples()[:4]), batch(samples(learned=1.1)[4:])]
    assert chunked.forward_backward(batches, sum_of_losses) == pytest.approx(
        plain.forward_backward(batches, sum_of_losses), rel=1e-6
    )
    actual, expected = gradients(chunked), gradients(plain)
    assert max(relative(actual[name], expected[name]) for name in expected) < 1e-5
    assert torch.equal(chunked.predictions(batches)[1], plain.predictions(batches)[1])
    for (scores, placed), (plain_scores, _) in zip(chunked.score(batches), plain.score(batches), strict=True):
        ours = scores.log_probs_and_entropy(placed.labels, 0.7)
        theirs = plain_scores.log_probs_and_entropy(placed.labels, 0.7)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_logits_are_made_for_learned_tokens_only(tmp_path):
    model = build(describe(tmp_path))
    seen = []
    model.module.get_output_embeddings().register_forward_hook(lambda _, args, output: seen.append(output.shape[1]))
    token_batch = batch(samples())
    model.forward_backward([token_batch, batch([])], sum_of_losses)
    assert seen == [token_batch.num_labels, 1]


def test_a_placeholder_gives_zero_gradients_to_everything(tmp_path):
    model = build(describe(tmp_path, "qwen3_moe"))
    assert model.forward_backward([batch([])], sum_of_losses) == [0.0]
    assert all(not gradient.any() for gradient in gradients(model).values())


def test_greedy_answers_are_those_of_transformers(tmp_path):
    model = build(describe(tmp_path))
    prompts = [[5, 9, 30], [77, 4, 8, 120, 33], [3]]
    answers = answer_greedily(model, prompts, 6, {2})
    plain = build(describe(tmp_path) | {"attention": "sdpa"}).module.eval()
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = plain.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=2)
        assert answer == expected[0, len(prompt) :].tolist()


def test_meta_gives_the_weights_of_the_cpu(tmp_path):
    one, other = build(describe(tmp_path)), build(describe(tmp_path), init_device="meta")
    for name, weight in one.module.state_dict().items():
        assert torch.equal(weight, other.module.state_dict()[name]), name


def test_a_reference_beside_a_model_with_frozen_weights_is_all_frozen(tmp_path):
    config = LanguageModelConfig(**describe(tmp_path), freeze=["embed_tokens"])
    train = load_config(TextTrainConfig, overrides={"output_dir": "unused", "num_threads": 1})
    assert not trainable_parameters(build_language_model(config, train, frozen=True).module)
    assert "model.embed_tokens.weight" not in trainable_parameters(build_language_model(config, train).module)


PUBLISHED_KEYS = {
    "deepseek_v3": {"ep_size": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1},
    "gemma3_text": {"sliding_window_pattern": 2, "rope_local_base_freq": 10_000.0, "cache_implementation": "hybrid"},
    "glm4_moe": {"partial_rotary_factor": 0.5, "num_nextn_predict_layers": 1},
    "gpt_oss": {
        "experts_per_token": 4,
        "initial_context_length": 4096,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "phi3": {"partial_rotary_factor": 0.75, "full_attn_mod": 1, "lm_head_bias": False},
    "qwen3_next": {"full_attention_interval": 2, "partial_rotary_factor": 0.25, "use_sliding_window": False},
}
"""Keys of published config.json files that transformers' classes have no field for; of some they make others."""


@pytest.mark.parametrize("kind", PUBLISHED_KEYS)
def test_a_published_config_is_a_description(tmp_path, kind):
    fields = tiny_config(kind).to_diff_dict()
    if "partial_rotary_factor" in PUBLISHED_KEYS[kind]:
        fields.pop("rope_parameters", None)
    published = fields | PUBLISHED_KEYS[kind] | {"model_type": kind, "transformers_version": "4.56.0"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(published))
    model = build({"config_path": str(path), "tokenizer_path": "bytes"})
    expected = AutoConfig.from_pretrained(tmp_path)
    assert model.module.config.rope_parameters == expected.rope_parameters
    assert getattr(model.module.config, "layer_types", None) == getattr(expected, "layer_types", None)
    assert all(key in model.notes[-1] for key in PUBLISHED_KEYS[kind])

    path.write_text(json.dumps({key: value for key, value in published.items() if key != "transformers_version"}))
    with pytest.raises(ConfigError, match="unknown key"):
        build({"config_path": str(path), "tokenizer_path": "bytes"})


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa", "minimax_m3_vl_text"])
def test_indexers_of_sparse_attention_are_frozen_since_no_gradient_reaches_them(tmp_path, kind):
    tiny_config(kind).save_pretrained(tmp_path)  # with keys that are no fields, such as qk_head_dim
    model = build({"config_path": str(tmp_path / "config.json"), "tokenizer_path": "bytes", "attention": "eager"})
    model.forward_backward([batch(samples())], sum_of_losses)
    without_gradient = {name for name, weight in model.module.named_parameters() if weight.grad is None}
    assert without_gradient == model.frozen_names != set()
    assert f"no gradient reaches {len(without_gradient)} weights" in " ".join(model.notes)
    # so that weight decay leaves them as they are
    assert not without_gradient & trainable_parameters(model.module).keys()


def saved(tmp_path, **changes):
    folder = tmp_path / "model"
    build(describe(tmp_path, **changes)).module.save_pretrained(folder)
    build_byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("init_device", ["cpu", "meta"])
def test_a_folder_is_loaded(tmp_path, init_device):
    folder = saved(tmp_path)
    model = build({"model_path": str(folder)}, init_device=init_device)
    expected = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[5, 9, 30]])
    actual = model.module(input_ids=ids, position_ids=torch.arange(3)[None]).logits
    torch.testing.assert_close(actual, expected(ids).logits, rtol=1e-5, atol=1e-6)
    assert len(AutoTokenizer.from_pretrained(folder)) == len(model.tokenizer) == 259


@pytest.mark.parametrize("init_device", ["cpu", "meta"])
def test_a_folder_with_wrong_weights_is_refused(tmp_path, init_device):
    folder = saved(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3, "layer_types": None}))
    with pytest.raises(ConfigError, match=r"model\.layers\.2"):
        build({"model_path": str(folder)}, init_device=init_device)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_sise": 3}, "hidden_sise: unknown key; did you mean 'hidden_size'"),
        ({"model_type": "qwen33"}, "did you mean 'qwen3'"),
        ({"num_attention_heads": "four"}, "transformers refuses it"),
        ({"vocab_size": 100}, "the tokenizer has 259 tokens, the model's vocabulary 100: take the"),
        ({"vocab_size": 258}, "vocab_size 259 of a description or transformers' resize_token_embeddings(259)"),
    ],
)
def test_a_wrong_description_is_named(tmp_path, changes, reason):
    with pytest.raises(ConfigError) as caught:
        build(describe(tmp_path, **changes))
    assert reason in str(caught.value)


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        build({"model_path": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"model\.tokenizer_path: .*nowhere does not exist"):
        build(describe(tmp_path) | {"tokenizer_path": str(tmp_path / "nowhere")})
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="finds no tokenizer"):
        build(describe(tmp_path) | {"tokenizer_path": str(tmp_path / "empty")})
    (tmp_path / "empty" / "tokenizer.model").write_bytes(b"\n\x0e")
    monkeypatch.setattr(parts, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install sentencepiece"):
        build(describe(tmp_path) | {"tokenizer_path": str(tmp_path / "empty")})
    monkeypatch.undo()
    for version, remedy in (
        ("2", "pip install flash-attn "),
        ("3", "the folder hopper"),
        ("4", "install flash-attn-4"),
    ):
        with pytest.raises(MissingDependencyError, match=f"{remedy}.*pip install kernels"):
            build(describe(tmp_path) | {"attention": f"flash_attention_{version}"})


def test_what_packed_attention_cannot_do_is_refused(tmp_path):
    model = build(describe(tmp_path))
    ids = torch.tensor([[5, 9, 30, 7]])
    with pytest.raises(ConfigError, match="no padding mask"):
        model.module(input_ids=ids, attention_mask=torch.tensor([[0, 1, 1, 1]]))
    cache = model.module(input_ids=ids, position_ids=torch.arange(4)[None], use_cache=True).past_key_values
    with pytest.raises(ConfigError, match="a cache of keys and values"):
        model.module(input_ids=ids[:, :1], position_ids=torch.tensor([[4]]), past_key_values=cache)


def exported(model, folder, merge=False):
    folder.mkdir()
    model.save_export(folder, dict(whole_weights(model.trained, model.mesh)), merge)
    return folder


def logits_of(module):
    ids = torch.tensor([[5, 9, 30, 201, 7]])
    with torch.no_grad():
        return module.eval()(input_ids=ids, position_ids=torch.arange(5)[None], use_cache=False).logits


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_the_model(tmp_path, kind):
    model = build(describe(tmp_path, kind, tie_word_embeddings=kind == "qwen2"))
    folder = exported(model, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits_of(loaded), logits_of(model.module), rtol=1e-5, atol=1e-6)
    assert AutoTokenizer.from_pretrained(folder).chat_template == model.tokenizer.chat_template
    again = build({"model_path": str(folder)}, init_device="meta")
    assert torch.equal(logits_of(again.module), logits_of(model.module))


@pytest.mark.parametrize("variant", ["lora", "rslora", "dora"])
def test_an_exported_adapter_is_the_model(tmp_path, variant):
    base = saved(tmp_path)
    lora = {"rank": 4, "alpha": 8, "variant": variant, "init_weights": "default"}
    model = build({"model_path": str(base), "lora": lora})
    for name, parameter in model.module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(len(name)))
    expected = logits_of(model.module)
    with model.without_adapter():
        assert not torch.allclose(logits_of(model.module), expected)
    adapter = exported(model, tmp_path / "adapter")
    torch.testing.assert_close(logits_of(AutoModelForCausalLM.from_pretrained(adapter)), expected)
    merged = exported(model, tmp_path / "merged", merge=True)
    torch.testing.assert_close(logits_of(AutoModelForCausalLM.from_pretrained(merged)), expected, rtol=1e-4, atol=1e-5)


def test_bf16_is_exported_as_the_forward_pass_saw_it(tmp_path):
    model = build(describe(tmp_path), mixed_precision="bf16")
    folder = exported(model, tmp_path / "out")
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
