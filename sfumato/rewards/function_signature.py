"""How a reward function is called, read from its signature before anything is drawn."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

from sfumato.errors import ConfigError

FLOW_GRPO = {"images", "prompts", "metadata"}
"""Parameters of a reward function of flow_grpo, which gets a batch and returns values and details."""
TRL = {"completions", "completion_ids"}
"""Parameters of a reward function of TRL, which gets columns of a batch by their names."""
VERL = {
    "data_source": 'row.get("data_source")',
    "solution_str": "sample.text",
    "predict_str": "sample.text",
    "model_output": "sample.text",
    "ground_truth": 'row.get("answer")',
    "extra_info": 'row.get("extra_info")',
}
"""Parameters of a reward function of verl, which gets one answer, and returns a number or a dictionary with it, and
what each is given. Those of its own scores have some of them, in another order."""

WRAPPERS = {
    "flow_grpo": """\
import numpy

def score(samples):
    images = numpy.stack([sample.image for sample in samples])  # uint8 [B, H, W, 3]
    # for a function of tensors: images = torch.from_numpy(images).permute(0, 3, 1, 2) / 255
    values = {name}(images, [sample.prompt for sample in samples], [sample.metadata for sample in samples])
    return values[0] if isinstance(values, tuple) else values""",
    "TRL": """\
def score(samples):
    columns = {{key: [sample.metadata.get(key) for sample in samples] for key in samples[0].metadata}}
    prompts, completions = [sample.prompt for sample in samples], [sample.text for sample in samples]
    # for conversations, whose functions get lists of messages:
    # prompts, completions = zip(*((sample.messages[:-1], sample.messages[-1:]) for sample in samples))
    return {name}(prompts=prompts, completions=completions, **columns)""",
    "verl": """\
def score(sample):  # rows of data.data_type verl; of others the columns have their own names
    row = sample.metadata
    value = {name}({arguments})
    return value["score"] if isinstance(value, dict) else value""",
}
"""What calls a function of others, by whose it is."""


def place_of(function: Callable[..., object]) -> tuple[str, int] | None:
    """File and line of a function, below its decorators; None where it is not written in Python."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else (code.co_filename, code.co_firstlineno)


def check_signature(function: Callable[..., object], path: str, groupwise: bool) -> None:
    """Looks whether a function can be called with one argument, a sample or the list of a group's samples.

    Args:
        function: of the user.
        path: where the configuration says that it stands.
        groupwise: whether it is given a list.

    Raises:
        ConfigError: when it cannot be called so; the message has the lines that call a function of another tool.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # one that is written in C may have none
        return
    names = list(signature.parameters)
    place = place_of(function)
    where = path if place is None else f"{path} ({place[0]}:{place[1]})"
    is_of_trl = bool({*names} & TRL) and "prompt" not in names  # AReaL's get one prompt
    is_of_verl = "ground_truth" in names and any(VERL.get(name) == "sample.text" for name in names)
    whose = "flow_grpo" if {*names} >= FLOW_GRPO else "TRL" if is_of_trl else "verl" if is_of_verl else ""
    needs_ids = getattr(signature.parameters.get("completion_ids"), "default", None) is inspect.Parameter.empty
    if whose == "TRL" and needs_ids:
        raise ConfigError(
            f"{where} is a function of TRL that takes token ids, which rewards do not see: write it for a Sample, with "
            "sample.text and sample.num_tokens, or take the reward length or overlong"
        )
    if whose:
        name = path.rpartition(":")[2]
        arguments = ", ".join(f"{parameter}={VERL[parameter]}" for parameter in names if parameter in VERL)
        wrapper = WRAPPERS[whose].format(name=name, arguments=arguments)
        if inspect.iscoroutinefunction(function):
            wrapper = wrapper.replace("def score(", "async def score(").replace(f" {name}(", f" await {name}(")
        raise ConfigError(
            f"{where} is a function of {whose}, {name}{signature}: put this beside it, and name it instead"
            f"{', with groupwise: true' if 'samples' in WRAPPERS[whose] else ''}\n{wrapper}"
        )
    argument = "the list of a group's samples" if groupwise else "a Sample"
    try:
        signature.bind(object())
    except TypeError as error:
        raise ConfigError(
            f"{where} must take one argument, {argument}, and is {path.rpartition(':')[2]}{signature}: {error}"
        ) from error
