"""Noise levels for training and sampling, read from a pipeline's scheduler, for flow models and UNets.

Steps from one noise level to the next are made by the dynamics and solvers of ``sfumato.algorithms``, not by the
scheduler. Each field of a scheduler is therefore treated in one of three ways. Fields about noise levels or the network
are used. Fields about the scheduler's own steps are ignored. All others are refused unless they have a harmless value,
since the model would be trained or sampled differently from what its scheduler says.
"""

# diffusers fills its namespaces lazily, which type checkers do not see
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import copy
import importlib.util
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, cast

import numpy as np
import torch
from torch import Tensor

from sfumato.config.open_mappings import Keywords
from sfumato.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from diffusers.configuration_utils import ConfigMixin
    from diffusers.schedulers.scheduling_ddim import DDIMScheduler

FLOW_MATCHING = ("FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler")
"""Schedulers for flow models only; Heun's noise levels are those of Euler."""

MULTISTEP = ("UniPCMultistepScheduler", "DPMSolverMultistepScheduler", "DPMSolverSinglestepScheduler")
"""Schedulers for flow models with ``use_flow_sigmas``, and for UNets without."""

OF_TIMESTEPS = ("DDIMScheduler", "DDIMParallelScheduler", "DDPMScheduler", "DDPMParallelScheduler", "PNDMScheduler")
"""Schedulers of UNets whose noise levels are those of timesteps of the training."""

SCALED_START = (
    "EulerDiscreteScheduler",
    "EulerAncestralDiscreteScheduler",
    "HeunDiscreteScheduler",
    "KDPM2DiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler",
    "LMSDiscreteScheduler",
)
"""Schedulers of UNets whose first latents have the standard deviation of the first noise level, except with
``timestep_spacing`` leading."""

OF_COGVIDEOX = ("CogVideoXDDIMScheduler", "CogVideoXDPMScheduler")
"""Schedulers of CogVideoX, whose noise levels are those of timesteps of a shifted schedule."""

OF_SIGMAS = (*SCALED_START, *MULTISTEP, "DEISMultistepScheduler", "SASolverScheduler")
"""Schedulers of UNets whose noise levels may lie between those of the timesteps of the training."""

SPACINGS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")
"""Fields that replace the spacing of the noise levels."""

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
"""Fields of a flow model's scheduler that are used."""

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
"""Fields of noise schedules of UNets; in a flow model they matter only with ``use_karras_sigmas``."""

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
"""Fields of a UNet's scheduler that are used."""

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
"""Fields of the scheduler's own steps, which are ignored. The last noise level is always 0, regardless of
``final_sigmas_type`` and ``set_alpha_to_one``."""

NEEDED: dict[str, tuple[object, ...]] = {
    "clip_sample": (False,),  # latents are larger than pixels
    "thresholding": (False,),
    "invert_sigmas": (False,),
    "stochastic_sampling": (False,),
    "timestep_type": ("discrete",),
    "variance_type": (None, "fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log"),
}
"""Values that are allowed for a field, the recommended one first. Other values clip predictions, reverse time, draw new
noise in each step, or belong to networks with more inputs or outputs."""

FLOW_NEEDED = {
    "use_flow_sigmas": (True,),
    "prediction_type": ("flow_prediction",),
    "final_sigmas_type": ("zero",),
    "use_exponential_sigmas": (False,),
    "use_beta_sigmas": (False,),
    "use_lu_lambdas": (False,),
}
"""Allowed values for ``MULTISTEP`` schedulers of a flow model: spacings made for UNets would give levels above 1."""

UNET_NEEDED = {
    "prediction_type": ("epsilon", "v_prediction"),
    "beta_schedule": ("linear", "scaled_linear", "squaredcos_cap_v2"),
    "use_flow_sigmas": (False,),
    "use_dynamic_shifting": (False,),
    "shift_terminal": (None,),
}
"""Allowed values for schedulers of a UNet."""

FILE = "scheduler/scheduler_config.json"
"""The scheduler's file in a pipeline folder."""

PATCH = 2
"""Latent pixels along each side of a token, by default."""

LARGEST_SHIFT = 1.15
"""``max_shift`` of a dynamic shift in most pipelines, if the scheduler does not set it."""


LARGEST_IMAGE = 4096
"""``max_image_seq_len`` of a scheduler that does not set it: tokens of the largest image."""


def settings_of(scheduler: ConfigMixin) -> Keywords:
    """Values of the fields that a scheduler's class takes; its file may hold fields of other classes besides."""
    names = inspect.signature(type(scheduler).__init__).parameters
    return {name: scheduler.config[name] for name in names if name in scheduler.config}


def check_flow_scheduler(scheduler: ConfigMixin, knows_size: bool = True, gives_sigmas: bool = False) -> None:
    """Checks that the noise levels of a flow model can be taken from a scheduler.

    Args:
        scheduler: the pipeline's scheduler.
        knows_size: whether the pipeline passes the size of an image to its scheduler, which a dynamic shift needs.
        gives_sigmas: as for ``flow_sigmas``.

    Raises:
        ConfigError: when the class of the scheduler or the value of a field is not supported; it names those that are.
    """
    name = type(scheduler).__name__
    if name in FLOW_MATCHING:
        _check_fields(scheduler, FLOW_FIELDS, NEEDED)
    elif name in MULTISTEP:
        # UniPC spaces levels that a pipeline gives it from the lowest to the highest
        takes_karras = name == "UniPCMultistepScheduler" and not gives_sigmas
        karras = {} if takes_karras else {"use_karras_sigmas": (False,)}
        _check_fields(scheduler, FLOW_FIELDS | BETAS | OF_STEPS, NEEDED | FLOW_NEEDED | karras)
    else:
        multistep = [f"{other} with use_flow_sigmas" for other in MULTISTEP]
        _refuse_class(name, "a flow model", [*FLOW_MATCHING, *multistep], "FlowMatchEulerDiscreteScheduler")
    if settings_of(scheduler).get("use_dynamic_shifting"):
        if not knows_size:
            _check_fields(scheduler, FLOW_FIELDS | BETAS | OF_STEPS, {"use_dynamic_shifting": (False,)})
        elif name in MULTISTEP[1:]:
            _check_fields(scheduler, FLOW_FIELDS | BETAS | OF_STEPS, {"time_shift_type": ("exponential",)})


def check_cogvideox_scheduler(scheduler: ConfigMixin) -> None:
    """Checks that the noise levels of CogVideoX can be taken from a scheduler; none of them clips, by any field.

    Raises:
        ConfigError: as ``check_flow_scheduler``.
    """
    name = type(scheduler).__name__
    if name not in OF_COGVIDEOX:
        _refuse_class(name, "CogVideoX", [*OF_COGVIDEOX], OF_COGVIDEOX[0])
    _check_fields(scheduler, UNET_FIELDS | OF_STEPS | {"snr_shift_scale", "clip_sample"}, UNET_NEEDED)


def check_unet_scheduler(scheduler: ConfigMixin) -> None:
    """Checks that the noise levels of a UNet can be taken from a scheduler.

    Raises:
        ConfigError: as ``check_flow_scheduler``; also when it starts from pure noise and the network predicts noise.
    """
    name = type(scheduler).__name__
    settings = settings_of(scheduler)
    if name not in (*OF_TIMESTEPS, *OF_SIGMAS):
        _refuse_class(name, "a UNet", [*OF_TIMESTEPS, *OF_SIGMAS], "DDIMScheduler")
    _check_fields(scheduler, UNET_FIELDS | OF_STEPS, NEEDED | UNET_NEEDED)
    if settings.get("rescale_betas_zero_snr") and settings["prediction_type"] == "epsilon":
        raise ConfigError(
            "the scheduler's rescale_betas_zero_snr starts from pure noise, where a prediction of the noise says "
            "nothing of the image: it goes with prediction_type v_prediction"
        )


def require_scipy(class_name: str, settings: object, where: str) -> None:
    """Checks that scipy is installed if diffusers needs it for a scheduler.

    Args:
        class_name: the scheduler's class.
        settings: the scheduler's fields; anything but a mapping counts as none.
        where: names the file or option, for messages.

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


def _refuse_class(name: str, model: str, supported: list[str], advised: str) -> NoReturn:
    """Raises ConfigError for a class of schedulers that is not supported, and advises one."""
    raise ConfigError(
        f"the scheduler {name} is none of {model} whose noise levels are known here: {', '.join(supported)}. If the "
        f"model goes with one of these, name it, such as {advised}, in model_index.json and as _class_name in {FILE}"
    )


def _check_fields(scheduler: ConfigMixin, used: set[str], needed: Mapping[str, tuple[object, ...]]) -> None:
    """Raises ConfigError for a field with a value that is not supported.

    Args:
        scheduler: the scheduler.
        used: fields that may have any value. Fields that are in neither set must have the default of the class.
        needed: allowed values of fields.
    """
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
    scheduler: ConfigMixin,
    num_steps: int,
    latent_shape: Sequence[int],
    *,
    patch: int = PATCH,
    largest_shift: float = LARGEST_SHIFT,
    gives_sigmas: bool = True,
    mu: float | None = None,
) -> Tensor:
    """Noise levels of a trajectory of a flow model, from the first of the schedule (at most 1) to 0.

    Args:
        scheduler: one that ``check_flow_scheduler`` accepts; it is not changed.
        num_steps: number of steps n.
        latent_shape: shape of the image's latent, on which a dynamic shift depends.
        patch: latent pixels along each side of a token.
        largest_shift: see ``dynamic_shift``.
        gives_sigmas: whether the pipeline passes the unshifted levels 1, 1 - 1/n, ... 1/n to schedulers that take them,
            instead of n.
        mu: a dynamic shift by a formula of the pipeline's own; None computes ``dynamic_shift``.

    Returns:
        float32 ``[num_steps + 1]``.
    """
    if type(scheduler).__name__ == "FlowMatchHeunDiscreteScheduler":
        scheduler = _as_euler(scheduler)
    settings = settings_of(scheduler)
    scheduler = copy.deepcopy(scheduler)
    shift_arguments = {}
    if gives_sigmas and num_steps == 1:  # any shift leaves level 1 as it is; shift_terminal would divide by zero
        return torch.tensor([1.0, 0.0])
    if settings.get("use_dynamic_shifting"):
        tokens = _num_tokens(latent_shape, patch)
        shift_arguments["mu"] = dynamic_shift(scheduler, tokens, largest_shift) if mu is None else mu
    if gives_sigmas and "sigmas" in inspect.signature(scheduler.set_timesteps).parameters:
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps), **shift_arguments)
    else:
        scheduler.set_timesteps(num_steps, **shift_arguments)
    return scheduler.sigmas.to(torch.float32)


def flow_shift(
    scheduler: ConfigMixin,
    latent_shape: Sequence[int] | None = None,
    *,
    patch: int = PATCH,
    largest_shift: float = LARGEST_SHIFT,
    mu: float | None = None,
) -> float:
    """The factor s of the scheduler's timestep shift, sigma -> s sigma / (1 + (s - 1) sigma).

    Args:
        scheduler, patch, largest_shift, mu: as for ``flow_sigmas``.
        latent_shape: shape of the image's latent; None is the largest image that the scheduler was made for.
    """
    settings = settings_of(scheduler)
    if not settings.get("use_dynamic_shifting"):
        return float(settings["flow_shift"] if "flow_shift" in settings else settings["shift"])
    if mu is None:
        largest = scheduler.config.get("max_image_seq_len", LARGEST_IMAGE)
        tokens = largest if latent_shape is None else _num_tokens(latent_shape, patch)
        mu = dynamic_shift(scheduler, tokens, largest_shift)
    return mu if settings["time_shift_type"] == "linear" else math.exp(mu)


def dynamic_shift(scheduler: ConfigMixin, tokens: int, largest_shift: float) -> float:
    """The shift mu of an image of so many tokens, as the pipelines compute it.

    mu is linear in the number of tokens: base_shift at base_image_seq_len, and max_shift at max_image_seq_len.
    ``largest_shift`` is the pipeline's default of ``max_shift``.
    """
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    defaults = {"base_shift": 0.5, "max_shift": largest_shift, "base_seq_len": 256, "max_seq_len": LARGEST_IMAGE}
    # diffusers' function has other names than the scheduler's fields for two of its arguments.
    names = {"base_seq_len": "base_image_seq_len", "max_seq_len": "max_image_seq_len"}
    settings = {key: scheduler.config.get(names.get(key, key), default) for key, default in defaults.items()}
    return float(calculate_shift(tokens, **settings))


def _num_tokens(latent_shape: Sequence[int], patch: int) -> int:
    """Number of tokens of an image whose latent ends in height and width."""
    return (latent_shape[-2] // patch) * (latent_shape[-1] // patch)


def _as_euler(scheduler: ConfigMixin) -> ConfigMixin:
    """A FlowMatchEulerDiscreteScheduler with the noise levels of a Heun scheduler, which lists each level twice."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(**settings_of(scheduler))


def as_ddim(scheduler: ConfigMixin) -> DDIMScheduler:
    """A DDIMScheduler with the noise schedule and timestep spacing of a UNet's scheduler."""
    from diffusers import DDIMScheduler

    names = inspect.signature(DDIMScheduler.__init__).parameters
    settings = {name: value for name, value in settings_of(scheduler).items() if name in names}
    return DDIMScheduler(**settings)


def unet_levels(scheduler: ConfigMixin) -> Tensor:
    """Noise levels s = c / (a + c) of all timesteps of a variance-preserving schedule: float64, ascending.

    a and c are the factors of image and noise, a^2 + c^2 = 1.
    """
    is_shifted = type(scheduler).__name__ in OF_COGVIDEOX
    source = cast("DDIMScheduler", scheduler) if is_shifted else as_ddim(scheduler)
    alphas_cumprod = source.alphas_cumprod.double()
    signal = alphas_cumprod.sqrt()
    noise = (1 - alphas_cumprod).sqrt()
    return noise / (signal + noise)


def unet_sigmas(scheduler: ConfigMixin, num_steps: int, levels: Tensor) -> Tensor:
    """Noise levels s of a trajectory of a UNet, then 0.

    Args:
        scheduler: one that ``check_unet_scheduler`` accepts; it is not changed.
        num_steps: number of steps.
        levels: ``unet_levels`` of the scheduler.

    Returns:
        float32 ``[num_steps + 1]``.
    """
    if type(scheduler).__name__ in (*OF_TIMESTEPS, *OF_COGVIDEOX):
        scheduler = as_ddim(scheduler)
        scheduler.set_timesteps(num_steps)
        chosen = levels[scheduler.timesteps]
    else:
        scheduler = copy.deepcopy(scheduler)
        scheduler.set_timesteps(num_steps)
        sigmas = torch.unique_consecutive(scheduler.sigmas.double())[:num_steps]  # c / a; Heun lists each twice
        timesteps = torch.unique_consecutive(scheduler.timesteps.double())
        # Whole timesteps have a float64 level in ``levels``; the scheduler's own sigmas are float32.
        is_point = len(timesteps) == len(sigmas) and bool((timesteps == timesteps.round()).all())
        is_respaced = any(settings_of(scheduler).get(name) for name in (*SPACINGS, "use_lu_lambdas"))
        chosen = levels[timesteps.long()] if is_point and not is_respaced else sigmas / (1 + sigmas)
    return torch.cat([chosen, torch.zeros(1, dtype=torch.float64)]).to(torch.float32)


def unet_start(scheduler: ConfigMixin, sigma: Tensor) -> Tensor:
    """The factor by which standard normal noise is multiplied at the start of a trajectory.

    Some schedulers start with the variance of the first noise level, the others with variance 1 on the
    variance-preserving path.

    Args:
        scheduler: the UNet's scheduler.
        sigma: the first noise level, ``[]``.
    """
    spacing = settings_of(scheduler).get("timestep_spacing")
    if type(scheduler).__name__ in SCALED_START and spacing in ("linspace", "trailing"):
        return sigma
    return torch.sqrt((1 - sigma) ** 2 + sigma**2)
