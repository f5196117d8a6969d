"""Shapes and dtypes in annotations are checked for real: each annotated function is called with them and with others.

The library names jaxtyping for readers and type checkers only and does not import it; here annotations are evaluated
and enforced by jaxtyping and beartype.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import types
import typing

import jaxtyping
import pytest
import torch
from beartype import beartype
from beartype.door import is_bearable

ALGORITHMS = "sfumato.algorithms"
MODULES = {
    f"{ALGORITHMS}.{name}"
    for name in (
        "advantages", "aggregation", "flow_matching", "forward_kl", "kl", "mismatch", "objectives", "off_policy",
        "preference", "reward_models",
        "row_losses", "sequences", "token_advantages", "token_kl", "token_objectives",
    )
}  # fmt: skip
MODULES |= {f"{ALGORITHMS}.forward_process.{name}" for name in ("noised", "sample_losses", "group_losses")}
MODULES |= {"sfumato.parallel.loss", "sfumato.models.language.scores"}
NAMES = {name: getattr(jaxtyping, name) for name in ("Bool", "Float", "Float32", "Float64", "Int64", "Real")}


def annotated(module):
    """Public functions, methods and dataclasses of a module whose annotations name shapes, by qualified name."""
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__ or getattr(value, "_is_protocol", False):
            continue
        members = [value]
        if inspect.isclass(value):
            members = [getattr(member, "__func__", member) for member in vars(value).values()]
            if dataclasses.is_dataclass(value) and any(map(has_shape, value.__annotations__.values())):
                yield value.__qualname__, value
        for function in members:
            is_public = isinstance(function, types.FunctionType) and not function.__name__.startswith("_")
            if is_public and any(map(has_shape, function.__annotations__.values())):
                yield function.__qualname__, function


def has_shape(annotation):
    return any(f"{kind}[Tensor" in str(annotation) for kind in NAMES) or "RowLosses" in str(annotation)


FOUND = {
    f"{name.removeprefix('sfumato.').removeprefix('algorithms.')}:{qualified}": value
    for name in sorted(MODULES)
    for qualified, value in annotated(importlib.import_module(name))
}


@functools.cache
def enforced(function):
    """A function whose arguments and result are held to its annotations."""
    scope = {**function.__globals__, **NAMES, "Tensor": torch.Tensor}
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__, copy.__qualname__ = function.__kwdefaults__, function.__qualname__
    hints = typing.get_type_hints(function, scope)
    protocols = {name for name, hint in hints.items() if getattr(hint, "_is_protocol", False)}
    copy.__annotations__ = {name: hint for name, hint in hints.items() if name not in protocols}
    return jaxtyping.jaxtyped(typechecker=beartype)(copy)


def fields_fit(value):
    """Whether the fields of a container have the shapes and dtypes that they are annotated with, one with another."""
    cls = type(value)
    scope = {**vars(importlib.import_module(cls.__module__)), **NAMES, "Tensor": torch.Tensor}
    hints = typing.get_type_hints(cls, scope)
    with jaxtyping.jaxtyped("context"):
        return all(is_bearable(getattr(value, field.name), hints[field.name]) for field in dataclasses.fields(cls))


R, N = 4, 6
generator = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(*shape, generator=generator)


def latents():
    return normal(R, 3, 2, 2)


def gaussian():
    from sfumato.algorithms.dynamics import gaussian_step

    return gaussian_step(latents(), torch.rand(R, generator=generator) + 0.5, torch.ones(R), latents())


def sampled():
    from sfumato.algorithms.objectives import SampledSteps

    return SampledSteps(latents(), normal(R), torch.rand(R, generator=generator) + 0.1, latents())


def ratio():
    from sfumato.algorithms.objectives import Ratio

    return Ratio(normal(R) * 0.01, torch.rand(R, generator=generator), torch.ones(R))


def noised():
    from sfumato.algorithms.forward_process.noised import NoisedSamples

    ids, levels = torch.tensor([0, 0, 1, 1]), torch.zeros(R, dtype=torch.int64)
    predictions = [latents() for _ in range(4)]
    return NoisedSamples(latents(), latents(), torch.full((R,), 0.5), predictions[0], ids, levels, *predictions[1:])


def correction():
    from sfumato.algorithms.mismatch import Correction

    return Correction(torch.ones(R), torch.zeros(R).double(), torch.zeros(R) > 0, torch.zeros(R) > 0)


def of_kind(name, **settings):
    """An object of an annotated class by its name."""
    module, _, cls = name.partition(":")
    prefix = "" if module.startswith(("models", "parallel")) else "algorithms."
    return getattr(importlib.import_module(f"sfumato.{prefix}{module}"), cls)(**settings)


def advantages_of(name, **settings):
    components = {"a": normal(N).double(), "b": normal(N).double()}
    rewards, ids = components["a"] + components["b"], torch.tensor([0, 0, 0, 1, 1, 1])
    return (of_kind(name, **settings), rewards, ids, components, {"a": 1.0, "b": 1.0})


MASK = torch.tensor([True, True, False, True])
SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0])
ROWS = torch.tensor([0, 0, 1, 1])


def scores():
    from sfumato.models.language.scores import TokenScores

    return TokenScores(normal(2, 5, 11), (2, 5))


def sequences():
    from sfumato.algorithms.sequences import Sequences

    return Sequences(ROWS, 2)


def token_advantages():
    return of_kind("token_advantages:Returns").compute(normal(2), sequences(), MASK)


def old_policy_arguments():
    return (of_kind("objectives:ClippedRatio"), of_kind("off_policy:Decoupled"), sampled(), gaussian(), ROWS)


def mismatch_arguments():
    return (of_kind("mismatch:Mismatch"), normal(R), correction(), normal(R), torch.rand(R), MASK)


TOKENS = (normal(2, 5, 8), normal(11, 8), torch.arange(10).view(2, 5), 1.0, normal(11))
"""Hidden states, weights, labels, temperature, bias."""


def raw_advantages():
    return of_kind("advantages:RawReward").compute(normal(N), torch.zeros(N, dtype=torch.int64))


CALLS = {
    "advantages:Advantages.useful": lambda: (raw_advantages(), True),
    "advantages:RewardSumAdvantage.compute": functools.partial(advantages_of, "advantages:GroupAdvantage"),
    "advantages:GDPO.compute": functools.partial(advantages_of, "advantages:GDPO"),
    "flow_matching:flow_matching_loss": lambda: (latents(), latents(), latents()),
    **{f"forward_kl:{name}.penalty": lambda name=name: (of_kind(f"forward_kl:{name}"), noised(), SIGNS)
       for name in ("VelocityMSE", "SampleMSE")},
    **{f"kl:{name}.penalty": lambda name=name: (of_kind(f"kl:{name}"), gaussian(), gaussian())
       for name in ("GaussianKL", "FlowGRPOKL", "VelocityMSE", "SampleMSE")},
    **{f"objectives:{name}.loss": lambda name=name: (of_kind(f"objectives:{name}"), ratio(), SIGNS, MASK)
       for name in ("ClippedRatio", "Guard", "DPPO")},
    "objectives:SampledSteps.log_ratio": lambda: (sampled(), gaussian()),
    "objectives:SampledSteps.old_means": lambda: (sampled(),),
    "objectives:clipped_surrogate": lambda: (normal(R), SIGNS, 0.1, 0.1, MASK),
    "objectives:ratio_sums": lambda: (normal(R), normal(R), MASK),
    "row_losses:masked": lambda: (normal(R), MASK),
    "off_policy:OffPolicy.correct": lambda: (of_kind("off_policy:Rejection"), normal(R), ROWS, MASK),
    "off_policy:log_ratio_of": lambda: (normal(R), ROWS, "trajectory", MASK),
    "mismatch:Mismatch.add": mismatch_arguments,
    "off_policy:old_policy": old_policy_arguments,
    "preference:preference_loss": lambda: (normal(3), normal(3), 0.1, "ipo", 0.0, (normal(3) + 9, normal(3) + 9)),
    "aggregation:row_weights": lambda: ("seq-mean-token-mean", torch.tensor([1, 2, 2, 2]), 7.0, 2.0, 5),
    "sequences:Sequences.named": lambda: (type(sequences()), ROWS),
    "sequences:Sequences.of_lengths": lambda: (type(sequences()), torch.tensor([2, 0, 1])),
    "sequences:Sequences.sums": lambda: (sequences(), normal(R), MASK),
    "sequences:Sequences.counts": lambda: (sequences(), MASK),
    "sequences:Sequences.means": lambda: (sequences(), normal(R), MASK),
    "sequences:Sequences.spread": lambda: (sequences(), normal(2)),
    "token_advantages:TokenAdvantage.compute": lambda: (
        of_kind("token_advantages:GAE"), normal(2), sequences(), MASK, normal(R), normal(R)),
    "token_advantages:Distillation.compute": lambda: (
        of_kind("token_advantages:Distillation"), normal(2), sequences(), MASK, normal(R)),
    "token_advantages:token_rewards": lambda: (normal(2), sequences(), MASK, normal(R)),
    "token_advantages:subtract_token_penalties": lambda: (normal(2), normal(R), sequences(), MASK),
    "token_advantages:discounted_returns": lambda: (normal(R), sequences(), MASK, 0.9),
    "token_advantages:gae": lambda: (normal(R), normal(R), sequences(), MASK, 0.9, 0.9),
    "token_advantages:whitened": lambda: (normal(R), MASK),
    "row_losses:value_loss": lambda: (normal(R), normal(R), normal(R), MASK),
    "token_kl:TokenKL.penalty": lambda: (of_kind("token_kl:TokenKL"), normal(R), normal(R), normal(R)),
    "token_kl:estimate": lambda: (normal(R), "k3"),
    **{f"token_objectives:{name}.loss": lambda name=name: (
        of_kind(f"token_objectives:{name}"), normal(R), SIGNS, MASK, sequences())
       for name in ("PPOClip", "GSPO", "GMPO", "CISPO", "SAPO", "PolicyGradient")},
    "token_objectives:sequence_log_ratio": lambda: (normal(R), MASK, sequences(), "token"),
    "preference:log1mexp": lambda: (-torch.rand(3),),
    "preference:kto_loss": lambda: (normal(3), torch.tensor([1.0, 0.0, 1.0]), 0.1, 0.1),
    "reward_models:bradley_terry_loss": lambda: (normal(3), normal(3), normal(3), 0.1),
    "reward_models:step_loss": lambda: (normal(3), torch.rand(3)),
    "forward_process.noised:NoisedSamples.velocity_of": lambda: (noised(), "old"),
    "forward_process.noised:NoisedSamples.predicted_x0": lambda: (noised(), latents()),
    "forward_process.noised:NoisedSamples.error": lambda: (noised(), latents()),
    "forward_process.noised:NoisedSamples.cells": lambda: (noised(),),
    "forward_process.noised:reward_probability": lambda: (SIGNS, 5.0, "binary"),
    "forward_process.noised:row_distances": lambda: (latents(), latents()),
    **{f"forward_process.{name}.loss": lambda name=name: (of_kind(f"forward_process.{name}"), noised(), SIGNS)
       for name in ("sample_losses:NFT", "sample_losses:AWM", "sample_losses:BestOfN", "group_losses:CRD",
                    "group_losses:DGPO", "group_losses:DPO")},
    "forward_process.sample_losses:RewardWeighted.loss": lambda: (
        of_kind("forward_process.sample_losses:RewardWeighted", temperature=1.0), noised(), SIGNS),
    "forward_process.sample_losses:AWM.log_prob": lambda: (
        of_kind("forward_process.sample_losses:AWM"), noised(), latents()),
    **{f"forward_process.group_losses:{name}.implicit_reward": lambda name=name: (
        of_kind(f"forward_process.group_losses:{name}"), noised()) for name in ("CRD", "DPO")},
    "parallel.loss:cross_entropy_sum": lambda: (normal(2, 5, 11), torch.arange(10).view(2, 5)),
    "parallel.loss:linear_cross_entropy": lambda: (*TOKENS[:3], TOKENS[4]),
    "parallel.loss:token_log_probs": lambda: TOKENS,
    "parallel.loss:token_log_probs_and_entropy": lambda: TOKENS,
    "models.language.scores:TokenScores.cross_entropy": lambda: (scores(), TOKENS[2]),
    "models.language.scores:TokenScores.log_probs": lambda: (scores(), TOKENS[2]),
    "models.language.scores:TokenScores.log_probs_and_entropy": lambda: (scores(), TOKENS[2]),
    "models.language.scores:TokenScores.predictions": lambda: (scores(),),
}  # fmt: skip

CONTAINERS = {
    "advantages:Advantages": raw_advantages,
    "objectives:SampledSteps": sampled,
    "objectives:Ratio": ratio,
    "mismatch:Correction": correction,
    "sequences:Sequences": sequences,
    "token_advantages:TokenAdvantages": token_advantages,
    "forward_process.noised:NoisedSamples": noised,
}


def test_every_annotated_function_and_container_is_called_here():
    assert set(FOUND) == {*CALLS, *CONTAINERS}
    assert len(FOUND) > 40


@pytest.mark.parametrize("name", CALLS)
def test_arguments_and_results_have_the_shapes_that_annotations_say(name):
    enforced(FOUND[name])(*CALLS[name]())


def misshapen(value):
    """Numbers without dimensions in the place of tensors; None where there is no tensor."""
    if isinstance(value, torch.Tensor):
        return value.flatten()[0]
    if isinstance(value, dict) and any(isinstance(inner, torch.Tensor) for inner in value.values()):
        return {key: misshapen(inner) for key, inner in value.items()}
    if isinstance(value, tuple) and any(isinstance(inner, torch.Tensor) for inner in value):
        return tuple(misshapen(inner) for inner in value)
    return None


def wrong_calls():
    for name, arguments in CALLS.items():
        for place, value in enumerate(arguments()):
            if misshapen(value) is not None:
                yield name, place


@pytest.mark.parametrize(("name", "place"), wrong_calls())
def test_an_argument_of_another_shape_is_refused(name, place):
    arguments = list(CALLS[name]())
    arguments[place] = misshapen(arguments[place])
    with pytest.raises(jaxtyping.TypeCheckError):
        enforced(FOUND[name])(*arguments)


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_hold_what_their_fields_say(name):
    value = CONTAINERS[name]()
    assert fields_fit(value)
    names = [field.name for field in dataclasses.fields(value)]
    tensors = [name for name in names if isinstance(getattr(value, name), torch.Tensor)]
    assert tensors
    for field in tensors:
        if len(tensors) > 1:
            assert not fields_fit(dataclasses.replace(value, **{field: getattr(value, field)[:-1]})), field
        assert not fields_fit(dataclasses.replace(value, **{field: getattr(value, field).to(torch.complex64)})), field


def test_the_library_does_not_import_what_only_readers_need():
    for name in MODULES:
        assert not set(NAMES) & set(vars(importlib.import_module(name))), name
