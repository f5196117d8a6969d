"""Guiders: components of some pipelines that hold the guidance scale and say how branches are put together."""

from __future__ import annotations

from sfumato.errors import ConfigError


def check_plain_guider(guider: object, pipeline_class: str) -> None:
    """Checks that a guider does what is done here: uncond + scale (cond - uncond) in every step.

    Its own ``guidance_scale`` and ``enabled`` are for diffusers; here the scale is that of the run's configuration.

    Args:
        guider: the component of a pipeline.
        pipeline_class: for the message.

    Raises:
        ConfigError: for another guider, or settings that would be ignored.
    """
    name = type(guider).__name__
    if name != "ClassifierFreeGuidance":
        raise ConfigError(
            f"{pipeline_class}: its guider is a {name}; here guidance is that of ClassifierFreeGuidance: put one into "
            "the folder"
        )
    plain = {"guidance_rescale": 0.0, "use_original_formulation": False, "start": 0.0, "stop": 1.0}
    config = getattr(guider, "config", {})
    for setting, value in plain.items():
        if config.get(setting, value) != value:
            raise ConfigError(
                f"{pipeline_class}: its guider has {setting} {config[setting]}, which is not done here: set it to "
                f"{value} in guider/guider_config.json"
            )
