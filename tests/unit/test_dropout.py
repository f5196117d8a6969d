"""Dropout with keys: the same masks however a batch is cut, and good random bits."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from sfumato.config.load import load_config
from sfumato.config.text_rl import TextRLConfig
from sfumato.errors import ConfigError
from sfumato.models.lora import ADAPTER, inject_adapter
from sfumato.parallel.dropout import keyed_dropout
from sfumato.parallel.keyed_dropout import KeyedDropout, keep_mask
from sfumato.rollout.text.policy import build_text_policy
from tests.dist.cases import CASES, build
from tests.tiny import tiny_text_rl_config, write_config


class Net(nn.Module):
    """Two dropouts whose outputs show their masks."""

    def __init__(self, p: float = 0.3) -> None:
        super().__init__()
        self.one, self.two = nn.Dropout(p), nn.Sequential(nn.Linear(6, 6), nn.Dropout(p))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.one(x), self.two[1](x)])


def masks(ids, positions=None, step=1, shape=(10, 6), seed=0, net=None) -> torch.Tensor:
    """Outputs for ones: ``[2 dropouts, B, *shape]``."""
    net = net or Net()
    keys = keyed_dropout(net, seed)
    with keys.batch(step, ids, positions):
        return net(torch.ones(len(ids), *shape))


def test_masks_are_the_same_for_every_cut_of_batch_and_sequence():
    whole = masks([7, 8, 9, 5])
    halves = [masks([7, 8]), masks(torch.tensor([9, 5]))]
    assert torch.equal(torch.cat(halves, 1), whole)
    order = torch.tensor([0, 9, 1, 8, 2, 7, 3, 6, 4, 5])
    parts = [masks([7, 8, 9, 5], word, shape=(5, 6)) for word in order.split(5)]
    assert torch.equal(torch.cat(parts, 2), whole[:, :, order])
    of_rows = torch.stack([order, order.flip(0), order, order])
    moved = masks([7, 8, 9, 5], of_rows)
    assert torch.equal(moved[:, 1], whole[:, 1, order.flip(0)]) and torch.equal(moved[:, 0], whole[:, 0, order])


def test_steps_samples_modules_and_seeds_have_masks_of_their_own():
    base = masks([7, 8])
    assert not torch.equal(base[0], base[1]) and not torch.equal(base[:, 0], base[:, 1])
    assert not torch.equal(base, masks([7, 8], step=2)) and not torch.equal(base, masks([7, 8], seed=1))
    assert not torch.equal(base[:, :, 0], base[:, :, 1])


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_bits_are_uniform_and_independent(p):
    keep = keep_mask(torch.arange(64), (64, 128, 256), p).double()
    count = keep.numel()
    deviation = (p * (1 - p) / count) ** 0.5
    assert abs(float(keep.mean()) - (1 - p)) < 4 * deviation
    for axis in range(3):  # the variance of means over one axis is that of independent draws
        means = keep.mean(axis)
        expected = p * (1 - p) / keep.shape[axis]
        assert float(means.var()) == pytest.approx(expected, rel=0.1)
    centred = (keep - keep.mean()) / keep.std()
    for neighbour in (centred.roll(1, 0), centred.roll(1, 1), centred.roll(1, 2), centred.roll((1, 1), (1, 2))):
        assert abs(float((centred * neighbour).mean())) < 4.5 / count**0.5


def test_values_scale_gradients_and_dtype_are_those_of_dropout():
    net = Net(0.25)
    keys = keyed_dropout(net, 0)
    x = torch.randn(2, 3, 6, dtype=torch.bfloat16, requires_grad=True)
    with keys.batch(1, [1, 2]):
        out = net.one(x)
    out.float().sum().backward()
    keep = out != 0
    assert out.dtype == torch.bfloat16 and 0 < int(keep.sum()) < keep.numel()
    torch.testing.assert_close(out[keep], (x.detach() * (1 / 0.75))[keep])
    torch.testing.assert_close(x.grad, torch.where(keep, torch.tensor(1 / 0.75, dtype=torch.bfloat16), 0.0))
    with torch.no_grad(), keys.batch(1, [1]):
        net.one.p = 1.0
        assert not net.one(x[:1]).any()
    assert torch.equal(net.eval()(x)[0], x)  # no batch is needed


def reference_bits(row_key: int, token: int, feature: int) -> int:
    """splitmix64 in plain integers."""
    mask = 2**64 - 1

    def mix(state: int) -> int:
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        return state ^ (state >> 31)

    state = mix((row_key + (token + 1) * 0x9E3779B97F4A7C15) & mask)
    return mix((state + (feature + 1) * 0x9E3779B97F4A7C15) & mask)


def test_the_hash_is_splitmix64_on_every_device():
    keep = keep_mask(torch.tensor([1, -5]), (2, 3, 5), 0.5)
    for row, key in enumerate((1, -5)):
        for token in range(3):
            for feature in range(5):
                bits = reference_bits(key % 2**64, token, feature)
                signed = bits - 2**64 if bits >= 2**63 else bits
                assert bool(keep[row, token, feature]) == (signed >= 0)
    if torch.cuda.is_available():
        assert torch.equal(keep_mask(torch.tensor([1, -5], device="cuda"), (2, 3, 5), 0.5).cpu(), keep)


def test_a_recomputed_block_drops_the_same_elements():
    net, x = Net(), torch.randn(2, 5, 6, requires_grad=True)
    keys = keyed_dropout(net, 0)
    grads = []
    for run in (net, lambda inputs: checkpoint(net, inputs, use_reentrant=False)):
        with keys.batch(3, [4, 5]):
            (run(x) ** 2).sum().backward()
        grads.append(x.grad)
        x.grad = None
    assert torch.equal(*grads)


def test_a_compiled_module_drops_the_same_elements():
    torch._dynamo.reset()
    net, twin = Net(), Net()
    twin.load_state_dict(net.state_dict())
    keys, x = keyed_dropout(net, 0), torch.ones(2, 5, 6)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in (3, 4):
            with keys.batch(step, [4, 5]):
                assert torch.equal(compiled(x), masks([4, 5], step=step, shape=(5, 6), net=twin))


def test_inputs_that_do_not_fit_are_named():
    net = Net()
    keys = keyed_dropout(net, 0)
    with pytest.raises(RuntimeError, match=r"dropout one does not know its samples.*keys\.batch"):
        net(torch.ones(2, 5, 6))
    with keys.batch(1, [1, 2]):
        with pytest.raises(RuntimeError, match=r"dropout one got \(10, 6\), but the batch has 2 sample ids"):
            net(torch.ones(10, 6))
        with pytest.raises(RuntimeError, match="open already"), keys.batch(2, [1, 2]):
            pass
        net(torch.ones(2, 6))
    with keys.batch(1, [1, 2], torch.arange(4)), pytest.raises(RuntimeError, match="positions of 4 tokens"):
        net(torch.ones(2, 5, 6))
    with pytest.raises(ValueError, match="positions"), keys.batch(1, [1, 2], torch.zeros(3, 4)):
        pass
    with pytest.raises(RuntimeError, match="does not know its samples"):
        copy.deepcopy(net)(torch.ones(2, 5, 6))


def test_dropout_that_cannot_be_keyed_is_refused():
    dense = CASES["dense"].build()
    dense.config.attention_dropout = 0.1
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM has attention_dropout 0\.1"):
        keyed_dropout(dense, 0)
    with pytest.raises(ConfigError, match="0 is a Dropout2d"):
        keyed_dropout(nn.Sequential(nn.Dropout2d(0.1)), 0)
    with pytest.raises(ConfigError, match="0 drops with probability"):
        keyed_dropout(nn.Sequential(nn.MultiheadAttention(4, 2, dropout=0.1)), 0)
    assert keyed_dropout(build("dense"), 0) is None  # diffusers and transformers blocks with p = 0 stay as they are


def test_adapters_know_their_features():
    from peft import LoraConfig

    dense = CASES["dense"].build()
    inject_adapter(dense, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.2), ADAPTER)
    names = dense.state_dict().keys()
    keys = keyed_dropout(dense, 0)
    results = [module for module in dense.modules() if isinstance(module, KeyedDropout)]
    assert len(results) == 8 and {module.features for module in results} == {32, 64}
    assert dense.state_dict().keys() == names
    with keys.batch(1, [3]):
        dense(input_ids=torch.arange(9)[None], use_cache=False)
        with pytest.raises(RuntimeError, match="part of its 64 features"):
            dense.model.layers[0].mlp.down_proj.lora_dropout["default"](torch.ones(1, 9, 32))


def test_settings_of_diffusers_models_are_not_looked_up_as_attributes():
    """Which diffusers warns of, and will refuse."""
    from diffusers import Transformer2DModel

    model = Transformer2DModel(num_attention_heads=1, attention_head_dim=8, in_channels=8, norm_num_groups=4)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", FutureWarning)
        keyed_dropout(model, 0)
    assert not [str(warning.message) for warning in warned]


def test_rl_of_a_policy_with_dropout_names_its_settings(tmp_path):
    described = {"model_type": "gpt2", "vocab_size": 259, "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 128}
    path = write_config(described | {"resid_pdrop": 0.1, "attn_pdrop": 0.0, "embd_pdrop": 0.1}, tmp_path / "gpt2.yaml")
    config = tiny_text_rl_config(tmp_path, model={"config_path": str(path)})
    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel has dropout .*: set resid_pdrop, embd_pdrop"):
        build_text_policy(load_config(TextRLConfig, overrides=config))
