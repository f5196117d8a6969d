"""Models that say one number of each token: from causal models and classifiers, packed rows, adapters, exports."""

import json

import pytest
import torch
import yaml
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSequenceClassification

from sfumato.config.critic import CriticConfig
from sfumato.config.load import load_config
from sfumato.config.text import LanguageModelConfig
from sfumato.config.text_data import TextTrainConfig
from sfumato.errors import ConfigError
from sfumato.models.language.load import build_byte_tokenizer
from sfumato.models.language.probe import probe
from sfumato.models.language.scalar_head import build_scalar_model
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import trainable_parameters
from sfumato.parallel.weights import whole_weights
from tests.tiny import tiny_language_description
from tests.token_batches import LENGTHS, batch, samples

LORA = {"rank": 4, "alpha": 8, "init_weights": "default"}


def describe(tmp_path, kind="qwen3", **changes):
    path = tmp_path / f"{kind}.yaml"
    path.write_text(yaml.safe_dump(tiny_language_description(kind) | changes))
    return {"config_path": str(path), "tokenizer_path": "bytes"}


def train_config(**train):
    return load_config(TextTrainConfig, overrides={"output_dir": "unused", "num_threads": 1, **train})


def build(model, head="random", **train):
    config = train_config(**train)
    built = build_scalar_model(LanguageModelConfig(**model), config, head)
    built.parallelize(Mesh(Layout(), torch.device("cpu")), config)
    return built


def causal_folder(tmp_path, **changes):
    """A folder of a causal model of transformers, and the model."""
    description = tiny_language_description() | changes
    config = CONFIG_MAPPING[description.pop("model_type")](**description)
    torch.manual_seed(1)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    module.save_pretrained(tmp_path / "causal")
    build_byte_tokenizer().save_pretrained(tmp_path / "causal")
    return tmp_path / "causal", module


def exported(model, folder):
    folder.mkdir()
    model.save_export(folder, dict(whole_weights(model.trained, model.mesh)))
    return folder


def square_error(values, batch):
    return (values - 1.0).square().sum() / 100


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe", "deepseek_v3"])
def test_values_of_packed_rows_are_those_of_the_documents_alone(tmp_path, kind):
    packed, alone = build(describe(tmp_path, kind)), build(describe(tmp_path, kind) | {"attention": "eager"})
    sample_list = samples()
    (result,) = packed.values([batch(sample_list)])
    assert result.dtype == torch.float32 and result.shape == (1, sum(LENGTHS)) and result.std() > 0.1
    for values, sample in zip(result[0].split(LENGTHS), sample_list, strict=True):
        torch.testing.assert_close(values, alone.values([batch([sample])])[0][0], rtol=1e-6, atol=1e-6)
    total = packed.forward_backward([batch(sample_list)], square_error)[0]
    losses = alone.forward_backward([batch([sample]) for sample in sample_list], square_error)
    assert total == pytest.approx(sum(losses), rel=1e-6)
    ours, theirs = trainable_parameters(packed.trained), trainable_parameters(alone.trained)
    for name, parameter in theirs.items():
        assert float((ours[name].grad - parameter.grad).norm() / parameter.grad.norm()) < 1e-5, name


@pytest.mark.parametrize("init_device", ["cpu", "meta"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_of_a_causal_model_gets_a_new_head(tmp_path, init_device, tied):
    folder, causal = causal_folder(tmp_path, tie_word_embeddings=tied)
    model = build({"model_path": str(folder)}, init_device=init_device)
    token_batch = batch(samples()[:1])
    hidden = causal.model(input_ids=token_batch.input_ids).last_hidden_state
    head = model.module.score.weight
    torch.testing.assert_close(model.values([token_batch])[0], (hidden @ head.T)[..., 0], rtol=1e-5, atol=1e-5)
    other = build({"model_path": str(folder)}, seed=1)
    assert not torch.equal(other.module.score.weight, head)
    assert torch.equal(build({"model_path": str(folder)}).module.score.weight, head)


@pytest.mark.parametrize("init_device", ["cpu", "meta"])
def test_a_head_may_begin_at_zero(tmp_path, init_device):
    token_batch = batch(samples())
    folder, _ = causal_folder(tmp_path)
    for source in (describe(tmp_path), {"model_path": str(folder)}):
        model = build(source, head="zero", init_device=init_device)
        assert not model.values([token_batch])[0].any()
        assert model.module.model.embed_tokens.weight.std() > 0.05


def test_meta_gives_the_weights_of_the_cpu(tmp_path):
    one, other = build(describe(tmp_path)), build(describe(tmp_path), init_device="meta")
    for name, weight in one.module.state_dict().items():
        assert torch.equal(weight, other.module.state_dict()[name]), name


@pytest.mark.parametrize("init_device", ["cpu", "meta"])
def test_an_export_is_a_classifier_of_transformers(tmp_path, init_device):
    model = build(describe(tmp_path, tie_word_embeddings=True))
    folder = exported(model, tmp_path / "out")
    theirs = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3ForSequenceClassification"]
    token_batch = batch(samples(), packed=False)
    ids = token_batch.input_ids
    mask = torch.arange(ids.shape[1]) < torch.tensor(token_batch.document_lengths)[:, None]
    with torch.no_grad():
        expected = theirs(input_ids=ids, attention_mask=mask.long()).logits[:, 0]
    (values,) = model.values([token_batch])
    last = values[range(len(token_batch.document_lengths)), torch.tensor(token_batch.document_lengths) - 1]
    torch.testing.assert_close(last, expected, rtol=1e-5, atol=1e-5)
    again = build({"model_path": str(folder)}, init_device=init_device)
    assert torch.equal(again.values([token_batch])[0], values)


def test_a_head_is_trained_beside_adapters_and_exported_with_them(tmp_path):
    folder, _ = causal_folder(tmp_path)
    model = build({"model_path": str(folder), "lora": LORA, "dtype": "bf16"})
    trained = trainable_parameters(model.trained)
    assert "score.weight" in trained and all(".lora_" in name for name in trained if name != "score.weight")
    assert {parameter.dtype for parameter in trained.values()} == {torch.float32}
    model = build({"model_path": str(folder), "lora": LORA})
    for name, parameter in trainable_parameters(model.trained).items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(len(name)))
    batches = [batch(samples())]
    merged = build({"model_path": str(exported(model, tmp_path / "merged"))})
    torch.testing.assert_close(merged.values(batches), model.values(batches), rtol=1e-4, atol=1e-5)


def test_frozen_weights_stay_and_the_probe_knows_of_them(tmp_path):
    model = build(describe(tmp_path) | {"freeze": ["embed_tokens", "q_proj"]})
    trained = trainable_parameters(model.trained)
    assert trained and not any("embed_tokens" in name or "q_proj" in name for name in trained)
    assert "score.weight" in trained
    probe(model, LanguageModelConfig(**describe(tmp_path)), train_config(), 32, lambda line: None)
    with pytest.raises(ConfigError, match="'vizual' takes no trained weight"):
        build(describe(tmp_path) | {"freeze": ["vizual"]})


def test_a_critic_is_trained_whole_beside_a_policy_with_frozen_weights(tmp_path):
    policy = LanguageModelConfig(**describe(tmp_path), freeze=["lm_head"])
    assert CriticConfig().derive_from(policy).freeze == []


def test_the_probe_finds_values_that_are_not_those_of_documents_alone(tmp_path):
    config = train_config()
    model = build(describe(tmp_path), head="zero")
    said = []
    probe(model, LanguageModelConfig(**describe(tmp_path)), config, 64, said.append)
    assert not said and not model.module.score.weight.any() and model.module.score.weight.grad is None

    def see_all(module, args, kwargs):
        return args, kwargs | {"position_ids": torch.zeros_like(kwargs["position_ids"])}

    model.plain.model.register_forward_pre_hook(see_all, with_kwargs=True)
    with pytest.raises(ConfigError, match="give other values than transformers gives"):
        probe(model, LanguageModelConfig(**describe(tmp_path), rows="packed"), config, 64, said.append)


def test_bf16_values_are_computed_in_float32(tmp_path):
    exact, half = build(describe(tmp_path)), build(describe(tmp_path), mixed_precision="bf16")
    batches = [batch(samples())]
    (actual,), (expected,) = half.values(batches), exact.values(batches)
    assert actual.dtype == torch.float32 and len(actual.unique()) == len(expected.unique())
    assert 0 < float((actual - expected).abs().max()) < 0.1


@pytest.mark.parametrize(
    ("model", "train", "reason"),
    [
        ({}, {"chunked_loss": True}, "a scalar head makes none"),
        ({"kind": "mamba2"}, {}, "no sequence classification for models of type mamba2"),
    ],
)
def test_what_has_no_scalar_head_is_refused(tmp_path, model, train, reason):
    source = describe(tmp_path)
    if model:
        path = tmp_path / "other.yaml"
        path.write_text(yaml.safe_dump({"model_type": "mamba2", "vocab_size": 259}))
        source["config_path"] = str(path)
    with pytest.raises(ConfigError, match=reason):
        build(source, **train)


def test_a_classifier_with_several_outputs_is_refused(tmp_path):
    _, causal = causal_folder(tmp_path)
    causal.config.num_labels = 3
    AutoModelForSequenceClassification.from_config(causal.config).save_pretrained(tmp_path / "three")
    build_byte_tokenizer().save_pretrained(tmp_path / "three")
    with pytest.raises(ConfigError, match=r"score\.weight is \[3, 32\]"):
        build({"model_path": str(tmp_path / "three")})
