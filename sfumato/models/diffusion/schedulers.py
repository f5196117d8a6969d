"""What is read of a pipeline's scheduler: its noise levels, for training and for sampling, of flow models and of UNets.

How a step is made from one level to the next is not the scheduler's matter here: the dynamics and solvers of
``sfumato.algorithms`` are. Each field of a scheduler is therefore of one of three kinds: it says something of the noise
levels or of the network and is used; it belongs to the scheduler's own steps and changes nothing; or the model would be
trained or sampled in another way than its scheduler says, and anything but a harmless value is refused.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfumato.errors import ConfigError, MissingDependencyError

FLOW_MATCHING = ("FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler")
"""Schedulers of flow models alone; Heun's noise levels are Euler's."""

MULTISTEP = ("UniPCMultistepScheduler", "DPMSolverMultistepScheduler", "DPMSolverSinglestepScheduler")
"""Schedulers of flow models when told so by ``use_flow_sigmas``, and of UNets else."""

OF_TIMESTEPS = ("DDIMScheduler", "DDIMParallelScheduler", "DDPMScheduler", "DDPMParallelScheduler", "PNDMScheduler")
"""Schedulers of UNets that go from one of the training's timesteps to another one."""

SCALED_START = (
    "EulerDiscreteScheduler",
    "EulerAncestralDiscreteScheduler",
    "HeunDiscreteScheduler",
    "KDPM2DiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler",
    "LMSDiscreteScheduler",
)
"""Schedulers of UNets whose first latents have the deviation of the first noise level, unless spacing is leading."""

OF_SIGMAS = (*SCALED_START, *MULTISTEP, "DEISMultistepScheduler", "SASolverScheduler")
"""Schedulers of UNets with noise levels of their own, which may lie between those of the training's timesteps."""

SPACINGS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")

FLOW_FIELDS = {
    "num_train_timesteps",
    "shift",
    "flow_shift",
    "use_flow_sigmas",
    "use_dynamic_shifting",
    "time_shift_type",
    "base_shift",
    "max_shift",
    "base_image_seq_len",
    "max_image_seq_len",
    "shift_terminal",
    "sigma_min",
    "sigma_max",
    "prediction_type",
    *SPACINGS,
}
"""Fields that are used of a scheduler of a flow model."""

BETAS = {
    "beta_start",
    "beta_end",
    "beta_schedule",
    "trained_betas",
    "rescale_betas_zero_snr",
    "timestep_spacing",
    "steps_offset",
    "lambda_min_clipped",
}
"""Fields of noise schedules of UNets, without effect in a flow model but under ``use_karras_sigmas``."""

UNET_FIELDS = {
    "num_train_timesteps",
    "prediction_type",
    "interpolation_type",
    "sigma_min",
    "sigma_max",
    "use_lu_lambdas",
    *BETAS,
    *SPACINGS,
}
"""Fields that are used of a scheduler of a UNet."""

OF_STEPS = {
    "algorithm_type",
    "clip_sample_range",
    "corrector_order",
    "disable_corrector",
    "dynamic_thresholding_ratio",
    "euler_at_final",
    "final_sigmas_type",
    "flow_shift",
    "lower_order_final",
    "predict_x0",
    "predictor_order",
    "sample_max_value",
    "set_alpha_to_one",
    "skip_prk_steps",
    "solver_order",
    "solver_p",
    "solver_type",
    "tau_func",
    "time_shift_type",
}
"""Fields of a scheduler's own steps, without effect. The last noise level is always 0, whatever ``final_sigmas_type``
and ``set_alpha_to_one`` say."""

NEEDED: dict[str, tuple[Any, ...]] = {
    "clip_sample": (False,),  # latents are larger than pixels
    "thresholding": (False,),
    "invert_sigmas": (False,),
    "stochastic_sampling": (False,),
    "timestep_type": ("discrete",),
    "variance_type": (None, "fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log"),
}
"""Values that a field must have, the first being that which is advised: others clip what is predicted, turn time round,
draw new noise in each step, or mean a network with further inputs or outputs."""

FLOW_NEEDED = {
    "use_flow_sigmas": (True,),
    "prediction_type": ("flow_prediction",),
    "final_sigmas_type": ("zero",),
    "use_exponential_sigmas": (False,),
    "use_beta_sigmas": (False,),
    "use_lu_lambdas": (False,),
}
"""The same of ``MULTISTEP`` in a flow model: what spaces noise levels of UNets gives levels above 1."""

UNET_NEEDED = {
    "prediction_type": ("epsilon", "v_prediction"),
    "beta_schedule": ("linear", "scaled_linear", "squaredcos_cap_v2"),
    "use_flow_sigmas": (False,),
    "use_dynamic_shifting": (False,),
    "shift_terminal": (None,),
}
"""The same of a UNet."""

FILE = "scheduler/scheduler_config.json"

PATCH = 2
"""Latent pixels along each side of a token, where a family has no other patches."""

LARGEST_SHIFT = 1.15
"""What most pipelines take for ``max_shift`` of a dynamic shift where the scheduler does not say it."""


def settings_of(scheduler: Any) -> dict[str, Any]:
    """The fields that a scheduler's class has, as they are set: its file may hold those of other classes besides."""
    names = inspect.signature(type(scheduler).__init__).parameters
    return {name: scheduler.config[name] for name in names if name in scheduler.config}


def check_flow_scheduler(scheduler: Any, knows_size: bool = True) -> None:
    """Whether noise levels of a flow model can be taken from a scheduler.

    Args:
        scheduler: of the pipeline.
        knows_size: the family's pipeline tells its scheduler how large an image is, which a dynamic shift needs.

    Raises:
        ConfigError: when another class of schedulers or another value of a field is needed; says which.
    """
    name = type(scheduler).__name__
    if name in FLOW_MATCHING:
        _check_fields(scheduler, FLOW_FIELDS, NEEDED)
    elif name in MULTISTEP:
        karras = {} if name == "UniPCMultistepScheduler" else {"use_karras_sigmas": (False,)}
        _check_fields(scheduler, FLOW_FIELDS | BETAS | OF_STEPS, NEEDED | FLOW_NEEDED | karras)
    else:
        multistep = [f"{other} with use_flow_sigmas" for other in MULTISTEP]
        _refuse_class(name, "a flow model", [*FLOW_MATCHING, *multistep], "FlowMatchEulerDiscreteScheduler")
    if settings_of(scheduler).get("use_dynamic_shifting"):
        if not knows_size:
            _check_fields(scheduler, FLOW_FIELDS | BETAS | OF_STEPS, {"use_dynamic_shifting": (False,)})
        elif name in MULTISTEP[1:]:
            _check_fields(scheduler, FLOW_FIELDS | BETAS | OF_STEPS, {"time_shift_type": ("exponential",)})


def check_unet_scheduler(scheduler: Any) -> None:
    """Whether noise levels of a UNet can be taken from a scheduler.

    Raises:
        ConfigError: as ``check_flow_scheduler``; also when it starts from pure noise with a network that predicts it.
    """
    name, settings = type(scheduler).__name__, settings_of(scheduler)
    if name not in (*OF_TIMESTEPS, *OF_SIGMAS):
        _refuse_class(name, "a UNet", [*OF_TIMESTEPS, *OF_SIGMAS], "DDIMScheduler")
    _check_fields(scheduler, UNET_FIELDS | OF_STEPS, NEEDED | UNET_NEEDED)
    if settings.get("rescale_betas_zero_snr") and settings["prediction_type"] == "epsilon":
        raise ConfigError(
            "the scheduler's rescale_betas_zero_snr starts from pure noise, where a prediction of the noise says "
            "nothing of the image: it goes with prediction_type v_prediction"
        )


def require_scipy(class_name: str, settings: Any, where: str) -> None:
    """Whether diffusers needs scipy for a scheduler, and has it.

    Args:
        class_name: of the scheduler.
        settings: its fields.
        where: they stand, for messages.

    Raises:
        MissingDependencyError: when scipy is needed and not installed.
    """
    fields = settings if isinstance(settings, Mapping) else {}
    reason = "use_beta_sigmas" if fields.get("use_beta_sigmas") else ""
    if class_name == "LMSDiscreteScheduler":
        reason = "its steps"
    if reason and importlib.util.find_spec("scipy") is None:
        raise MissingDependencyError(
            f"{where}: {class_name or 'its scheduler'} needs the package scipy for {reason}, which is not installed: "
            "pip install scipy"
        )


def _refuse_class(name: str, model: str, supported: list[str], advised: str) -> None:
    raise ConfigError(
        f"the scheduler {name} is none of {model} whose noise levels are known here: {', '.join(supported)}. If the model "
        f"goes with one of these, name it, such as {advised}, in model_index.json and as _class_name in {FILE}"
    )


def _check_fields(scheduler: Any, used: set[str], needed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises ConfigError for a field that has no value that is needed, or that is new and not as it is by default."""
    defaults = inspect.signature(type(scheduler).__init__).parameters
    for field, value in settings_of(scheduler).items():
        allowed = needed.get(field, (value,) if field in used else (defaults[field].default,))
        if value not in allowed:
            named = " or ".join(map(repr, allowed))
            raise ConfigError(
                f"the scheduler {type(scheduler).__name__} needs {field} {named}; {value!r} is not known here: set it "
                f"in {FILE}, if the model was trained so"
            )


def flow_sigmas(
    scheduler: Any,
    num_steps: int,
    latent_shape: Sequence[int],
    *,
    patch: int = PATCH,
    largest_shift: float = LARGEST_SHIFT,
    gives_sigmas: bool = True,
) -> Tensor:
    """Noise levels of a trajectory of a flow model, from 1, or where a schedule begins, to 0.

    Args:
        scheduler: that ``check_flow_scheduler`` takes; it stays as it is.
        num_steps: n.
        latent_shape: of the image, whose size a dynamic shift follows.
        patch: latent pixels along each side of a token.
        largest_shift: see ``dynamic_shift``.
        gives_sigmas: the pipeline gives 1, 1 - 1/n, ... 1/n to be shifted, where the scheduler takes them, and not n.

    Returns:
        float32 ``[num_steps + 1]``.
    """
    if type(scheduler).__name__ == "FlowMatchHeunDiscreteScheduler":
        scheduler = _as_euler(scheduler)
    scheduler, settings, shift_arguments = copy.deepcopy(scheduler), settings_of(scheduler), {}
    if gives_sigmas and num_steps == 1:  # shift or none, and shift_terminal would divide by zero
        return torch.tensor([1.0, 0.0])
    if settings.get("use_dynamic_shifting"):
        shift_arguments["mu"] = dynamic_shift(scheduler, _num_tokens(latent_shape, patch), largest_shift)
    if gives_sigmas and "sigmas" in inspect.signature(scheduler.set_timesteps).parameters:
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps), **shift_arguments)
    else:
        scheduler.set_timesteps(num_steps, **shift_arguments)
    return scheduler.sigmas.to(torch.float32)


def flow_shift(
    scheduler: Any,
    latent_shape: Sequence[int] | None = None,
    *,
    patch: int = PATCH,
    largest_shift: float = LARGEST_SHIFT,
) -> float:
    """The factor s of the scheduler's shift of an image, sigma -> s sigma / (1 + (s - 1) sigma).

    Args:
        scheduler, patch, largest_shift: as for ``flow_sigmas``.
        latent_shape: of the image; None is the largest that the scheduler was made for.
    """
    settings = settings_of(scheduler)
    if not settings.get("use_dynamic_shifting"):
        return float(settings["flow_shift"] if "flow_shift" in settings else settings["shift"])
    largest = scheduler.config.get("max_image_seq_len", 4096)
    tokens = largest if latent_shape is None else _num_tokens(latent_shape, patch)
    mu = dynamic_shift(scheduler, tokens, largest_shift)
    return mu if settings["time_shift_type"] == "linear" else math.exp(mu)


def dynamic_shift(scheduler: Any, tokens: int, largest_shift: float) -> float:
    """The line through (base_image_seq_len, base_shift) and (max_image_seq_len, max_shift); the pipelines' defaults.

    ``largest_shift`` is what a pipeline takes for ``max_shift`` where the scheduler does not say it.
    """
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    defaults = {"base_shift": 0.5, "max_shift": largest_shift, "base_seq_len": 256, "max_seq_len": 4096}
    names = {"base_seq_len": "base_image_seq_len", "max_seq_len": "max_image_seq_len"}
    settings = {key: scheduler.config.get(names.get(key, key), default) for key, default in defaults.items()}
    return float(calculate_shift(tokens, **settings))


def _num_tokens(latent_shape: Sequence[int], patch: int) -> int:
    return (latent_shape[-2] // patch) * (latent_shape[-1] // patch)


def _as_euler(scheduler: Any) -> Any:
    """FlowMatchEulerDiscreteScheduler with the noise levels of Heun's, each of which that one has twice."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(**settings_of(scheduler))


def as_ddim(scheduler: Any) -> Any:
    """A DDIMScheduler with the noise schedule and the spacing of timesteps of a UNet's scheduler."""
    from diffusers import DDIMScheduler

    names = inspect.signature(DDIMScheduler.__init__).parameters
    settings = {name: value for name, value in settings_of(scheduler).items() if name in names}
    return DDIMScheduler(**settings)


def unet_levels(scheduler: Any) -> Tensor:
    """s = c / (a + c) of each timestep of a variance-preserving schedule: float64, ascending."""
    alphas_cumprod = as_ddim(scheduler).alphas_cumprod.double()
    signal, noise = alphas_cumprod.sqrt(), (1 - alphas_cumprod).sqrt()
    return noise / (signal + noise)


def unet_sigmas(scheduler: Any, num_steps: int, levels: Tensor) -> Tensor:
    """The noise levels s of a trajectory of a UNet, then 0.

    Args:
        scheduler: that ``check_unet_scheduler`` takes; it stays as it is.
        num_steps: of the trajectory.
        levels: ``unet_levels`` of the scheduler.

    Returns:
        float32 ``[num_steps + 1]``.
    """
    if type(scheduler).__name__ in OF_TIMESTEPS:
        scheduler = as_ddim(scheduler)
        scheduler.set_timesteps(num_steps)
        chosen = levels[scheduler.timesteps]
    else:
        scheduler = copy.deepcopy(scheduler)
        scheduler.set_timesteps(num_steps)
        sigmas = torch.unique_consecutive(scheduler.sigmas.double())[:num_steps]  # c / a; Heun's stand there twice
        timesteps = torch.unique_consecutive(scheduler.timesteps.double())
        is_point = len(timesteps) == len(sigmas) and bool((timesteps == timesteps.round()).all())
        is_respaced = any(settings_of(scheduler).get(name) for name in (*SPACINGS, "use_lu_lambdas"))
        chosen = levels[timesteps.long()] if is_point and not is_respaced else sigmas / (1 + sigmas)
    return torch.cat([chosen, torch.zeros(1, dtype=torch.float64)]).to(torch.float32)


def unet_start(scheduler: Any, sigma: Tensor) -> Tensor:
    """By what noise of variance 1 is multiplied where a trajectory begins at the level ``sigma`` ``[]``.

    The scheduler starts with variance 1 on the variance-preserving path, or with that which belongs to the level.
    """
    spacing = settings_of(scheduler).get("timestep_spacing")
    if type(scheduler).__name__ in SCALED_START and spacing in ("linspace", "trailing"):
        return sigma
    return torch.sqrt((1 - sigma) ** 2 + sigma**2)
