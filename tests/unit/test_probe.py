"""What the probe before the first step notices, on models that it has never heard of."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from sfumato.config.load import load_config
from sfumato.config.text import LanguageModelConfig
from sfumato.config.text_data import TextTrainConfig
from sfumato.data.text.token_batch import TokenBatch
from sfumato.errors import ConfigError
from sfumato.models.language.load import build_byte_tokenizer
from sfumato.models.language.model import LanguageModel
from sfumato.models.language.packed_attention import register_packed_attention
from sfumato.models.language.probe import Checks, make_documents, probe
from sfumato.models.language.tolerance import Noise, Tolerance
from sfumato.parallel import memory
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh

SMALL = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}


class Plain(LlamaForCausalLM):
    """Nothing particular."""


class Leaking(LlamaForCausalLM):
    """A short convolution over the tokens of a row, whatever documents they belong to."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: object) -> object:
        embeddings = self.model.embed_tokens(input_ids)
        before = torch.cat([torch.zeros_like(embeddings[:, :1]), embeddings[:, :-1]], 1)
        return super().forward(inputs_embeds=embeddings + 0.5 * before, position_ids=position_ids, **kwargs)


class Foresighted(LlamaForCausalLM):
    """Each token knows the next."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: object) -> object:
        embeddings = self.model.embed_tokens(input_ids)
        after = torch.cat([embeddings[:, 1:], torch.zeros_like(embeddings[:, :1])], 1)
        return super().forward(inputs_embeds=embeddings + 0.5 * after, position_ids=position_ids, **kwargs)


class TwoGraphs(LlamaForCausalLM):
    """As where blocks are compiled: the graph of the first length gives way to one of any length, which rounds
    otherwise."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: object) -> object:
        lengths = vars(self).setdefault("lengths", set())
        lengths.add(input_ids.shape[1])
        output = super().forward(input_ids, position_ids=position_ids, **kwargs)
        output.logits = output.logits * (1 + 1e-6 * (len(lengths) > 1))
        return output


class Scattering(LlamaForCausalLM):
    """As with kernels that add in any order: each pass rounds a little differently."""

    passes = 0

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: object) -> object:
        self.passes += 1
        output = super().forward(input_ids, position_ids=position_ids, **kwargs)
        output.logits = output.logits * (1 + 1e-6 * (-1) ** (self.passes // 2))
        return output


class Capped(LlamaForCausalLM):
    """A soft cap on the logits that no field of the configuration tells."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: object) -> object:
        output = super().forward(input_ids, position_ids=position_ids, **kwargs)
        output.logits = 2.0 * torch.tanh(output.logits / 2.0)
        return output


class Warmed(LlamaForCausalLM):
    """Logits whose scale depends on the row's own hidden states."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: object) -> object:
        hidden = self.model(input_ids, position_ids=position_ids, **kwargs).last_hidden_state
        output = super().forward(input_ids, position_ids=position_ids, **kwargs)
        output.logits = output.logits * hidden.abs().mean(-1, keepdim=True)
        return output


class Jittering(LlamaForCausalLM):
    """Noise on the embeddings in training."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: object) -> object:
        embeddings = self.model.embed_tokens(input_ids)
        if self.training:
            embeddings = embeddings * torch.empty_like(embeddings).uniform_(0.99, 1.01)
        return super().forward(inputs_embeds=embeddings, position_ids=position_ids, **kwargs)


class Stretched(LlamaForCausalLM):
    """Rotary positions that depend on the length of the row."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: object) -> object:
        length = input_ids.shape[1]
        positions = torch.arange(length)[None] if position_ids is None else position_ids
        rotary = self.model.rotary_emb
        scaled = rotary(self.model.embed_tokens(input_ids), positions * 8.0 / length)
        rotary.forward = lambda *args, **kwargs: scaled
        try:
            return super().forward(input_ids, position_ids=positions, **kwargs)
        finally:
            del rotary.forward


class Remembering(LlamaForCausalLM):
    """Something is kept from one pass to the next."""

    passes = 0

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: object) -> object:
        self.passes += 1
        embeddings = self.model.embed_tokens(input_ids) * (1 + 0.05 * self.passes)
        return super().forward(inputs_embeds=embeddings, position_ids=position_ids, **kwargs)


@pytest.fixture(params=[True, False], ids=["copy", "no copy"])
def with_and_without_copy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether transformers' module is built beside the model as the reference: a large model is its own."""
    if not request.param:
        monkeypatch.setattr("sfumato.models.language.probe.LARGEST_COPY", 0)


def make(cls: type, config: object = None, **train: object) -> tuple[LanguageModel, TextTrainConfig]:
    attention = register_packed_attention()
    config = config or LlamaConfig(**SMALL)

    def build() -> torch.nn.Module:
        config._attn_implementation = attention
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return cls(config)

    settings = load_config(TextTrainConfig, overrides={"output_dir": "unused", "max_steps": 1, **train})
    half = torch.bfloat16 if settings.mixed_precision == "bf16" else None
    model = LanguageModel(build(), build_byte_tokenizer(), half, build, None, settings.chunked_loss)
    model.parallelize(Mesh(Layout(), torch.device("cpu")), settings)
    return model, settings


def look(
    cls: type, config: object = None, model: dict | None = None, **train: object
) -> tuple[LanguageModel, list[str]]:
    """The model after the probe, and what the probe has said."""
    made, settings = make(cls, config, **train)
    described = LanguageModelConfig(config_path=__file__, tokenizer_path="bytes", **(model or {}))
    said: list[str] = []
    probe(made, described, settings, 64, said.append)
    return made, said


WAYS = [{}, {"chunked_loss": True}, {"mixed_precision": "bf16"}, {"dyn_bsz": False, "rmpad_with_pos_ids": False}]


@pytest.mark.usefixtures("with_and_without_copy")
@pytest.mark.parametrize("train", WAYS)
def test_what_is_right_is_left_as_it_is(train: dict) -> None:
    model, said = look(Plain, **train)
    assert (model.row_layout.rows, said) == ("packed", [])
    assert all(parameter.grad is None for parameter in model.module.parameters())
    assert model.module.training


def test_what_rounding_changes_is_measured_where_a_difference_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in half precision of large models, where packed rows differ by more than any bound that holds for all."""
    exact = Tolerance((1e-6, 5.0), size=0.0, relative=(1e-6, 0.5))
    monkeypatch.setattr("sfumato.models.language.tolerance.HALF", exact)
    model, said = look(Plain, mixed_precision="bf16")
    assert (model.row_layout.rows, said) == ("packed", [])
    model, said = look(Leaking, mixed_precision="bf16")
    assert model.row_layout.rows == "documents" and said
    # as if it were not measured
    monkeypatch.setattr(Checks, "_find_noise", lambda *_: Noise(0.0, 0.0))
    assert look(Plain, mixed_precision="bf16", probe="warn")[1]


def test_a_large_model_makes_no_logits_of_whole_long_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor scores of all their pairs of tokens: with its loss in chunks a run may have no room for either."""
    monkeypatch.setattr("sfumato.models.language.probe.LARGEST_COPY", 0)
    model, settings = make(Plain, chunked_loss=True)
    checks = Checks(model, make_documents(model, settings, 64), settings, copies=1)
    passes = []
    compute = LanguageModel.compute_probe_values

    def compute_and_note(language_model: LanguageModel, batches: list[TokenBatch]) -> list[Tensor]:
        passes.append((batches[0].shape[1], language_model.attention, language_model._chunked))
        return compute(language_model, batches)

    monkeypatch.setattr(LanguageModel, "compute_probe_values", compute_and_note)
    assert checks.reference() is not None
    assert passes == [(62, "eager", False), (63, "sdpa", True), (64, "sdpa", True)]


def test_the_numbers_of_the_run_are_those_without_a_probe() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model, _ = look(Plain)
    assert torch.equal(torch.get_rng_state(), before)
    unprobed, _ = make(Plain)
    theirs = dict(unprobed.module.named_parameters())
    assert all(torch.equal(parameter, theirs[name]) for name, parameter in model.module.named_parameters())


def test_passes_of_two_graphs_are_not_taken_for_a_leak(monkeypatch) -> None:
    monkeypatch.setattr(memory, "apply_memory_savings", lambda *_, **__: None)
    monkeypatch.setattr(Checks, "_find_scatter", lambda *_: pytest.fail("both passes are of the same graph"))
    model, messages = look(TwoGraphs, compile=True, pad_to_multiple_of=1)
    assert len(model.plain.lengths) > 1 and not messages


def test_kernels_that_add_in_any_order_are_not_taken_for_a_leak() -> None:
    model, messages = look(Scattering)
    assert model.plain.passes > 4 and not messages


@pytest.mark.usefixtures("with_and_without_copy")
def test_documents_that_leak_get_rows_of_their_own() -> None:
    model, said = look(Leaking)
    assert model.row_layout.rows == "documents" and len(said) == 1
    assert "Leaking: documents together give other log-probabilities" in said[0]
    with pytest.raises(ConfigError, match=r"Right is model\.attention packed with model\.rows documents"):
        look(Leaking, model={"rows": "packed"})


class Certain(LlamaForCausalLM):
    """Logits are larger than those of trained models, and with them their rounding."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        with torch.no_grad():
            self.lm_head.weight *= 20


class CertainLeaking(Leaking, Certain):
    """Large logits, of documents that see each other."""


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_large_logits_are_rounded_by_their_size(precision: str) -> None:
    model, said = look(Certain, mixed_precision=precision)
    assert (model.row_layout.rows, said) == ("packed", [])
    assert look(CertainLeaking, mixed_precision=precision)[0].row_layout.rows == "documents"


def test_a_leak_can_be_a_warning() -> None:
    model, said = look(Leaking, model={"rows": "packed"}, probe="warn")
    assert (
        said[0].startswith("WARNING: Leaking is not trained as transformers would")
        and model.row_layout.rows == "packed"
    )


def test_a_leak_is_noticed_in_bf16() -> None:
    assert look(Leaking, mixed_precision="bf16")[0].row_layout.rows == "documents"


@pytest.mark.usefixtures("with_and_without_copy")
def test_a_model_that_looks_ahead_is_refused() -> None:
    with pytest.raises(ConfigError, match="a token notices what comes after it"):
        look(Foresighted)


def test_a_hidden_cap_is_applied_to_chunks_too() -> None:
    for chunked in (False, True):
        assert look(Capped, chunked_loss=chunked)[1] == []


def test_chunks_that_cannot_be_right_are_refused() -> None:
    assert look(Warmed)[1] == []
    with pytest.raises(ConfigError, match="is not trained as transformers would"):
        look(Warmed, chunked_loss=True)


def test_noise_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"draws random numbers from the generator of torch .* set it to 0 in model\.c"
    ):
        look(Jittering)


@pytest.mark.usefixtures("with_and_without_copy")
def test_positions_that_depend_on_the_row_get_rows_of_one_length() -> None:
    model, said = look(Stretched)
    assert model.row_layout.rows == "documents" and model.row_layout.same_length and len(said) == 1


@pytest.mark.usefixtures("with_and_without_copy")
def test_what_is_kept_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not trained as transformers would"):
        look(Remembering)


def test_a_window_is_looked_at_beyond_its_end() -> None:
    config = MistralConfig(**SMALL, sliding_window=40)
    assert look(MistralForCausalLM, config)[1] == []


class Choosing(LlamaForCausalLM):
    """Beyond 30 tokens of a row something else is computed, as where the best keys are chosen."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: object) -> object:
        embeddings = self.model.embed_tokens(input_ids) * (2.0 if input_ids.shape[1] > 30 else 1.0)
        return super().forward(inputs_embeds=embeddings, position_ids=position_ids, **kwargs)


def test_what_begins_at_a_length_of_the_row_is_noticed() -> None:
    model, said = look(Choosing)
    assert model.row_layout.same_length and len(said) == 1


class Tabled(LlamaForCausalLM):
    """A mask that is cut from a table of positions, as GPT-Neo's."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: object) -> object:
        if input_ids.shape[1] > self.config.max_position_embeddings:
            raise RuntimeError("The size of tensor a must match the size of tensor b")
        return super().forward(input_ids, position_ids=position_ids, **kwargs)


def test_rows_longer_than_a_table_of_positions_are_noticed() -> None:
    model, said = look(Tabled, micro_batch_size=4)
    assert model.row_layout.rows == "documents" and len(said) == 1


def test_a_module_that_transformers_cannot_run_is_named() -> None:
    class Broken(LlamaForCausalLM):
        def forward(self, *args: object, **kwargs: object) -> object:
            raise RuntimeError("no such kernel")

    with pytest.raises(ConfigError, match="Broken of transformers computes no document alone: RuntimeError: no such k"):
        look(Broken)


def test_a_processor_that_counts_other_tokens_than_the_model_is_named() -> None:
    class Broken(LlamaForCausalLM):
        def forward(self, *args: object, **kwargs: object) -> object:
            raise ValueError("Image features and image tokens do not match, tokens: 575, features: 576")

    with pytest.raises(ConfigError, match=r"features: 576.*num_additional_image_tokens.* with config.json"):
        look(Broken)


def test_documents_are_the_same_every_time_and_fit_into_a_micro_batch() -> None:
    def lengths(max_seq_len: int, micro_batch_size: int) -> list[list[int]]:
        model, settings = make(Plain, micro_batch_size=micro_batch_size)
        first, again = (make_documents(model, settings, max_seq_len) for _ in range(2))
        ids = [[document.documents[0].input_ids for part in made for document in part] for made in (first, again)]
        assert all(np.array_equal(one, other) for one, other in zip(*ids, strict=True))
        return [[document.num_tokens for document in part] for part in first]

    assert lengths(64, 1) == [[13, 5, 21, 21, 2], [36, 27], [64]]
    assert lengths(64, 2) == [[13, 5, 21, 21, 2], [64, 48]]
    assert lengths(64, 4) == [[13, 5, 21, 21, 2], [64, 48, 17]]  # one token more than the model has positions
    assert lengths(8, 1) == [[8, 5, 8, 8, 2]]
    assert lengths(100_000, 1)[1:] == [[8192, 6144]]
