"""RL algorithms whose parts a recipe presets."""

from __future__ import annotations

from typing import Any, cast

from pydantic import model_validator

from sfumato.config.open_mappings import JsonObject
from sfumato.config.rl import AlgorithmConfig, RLConfig


class RecipeAlgorithmConfig(AlgorithmConfig):
    """The RL algorithm as parts; a recipe presets all of them."""

    recipe: str
    """Preset of the parts below; any of their fields can be overridden."""

    @classmethod
    def recipes(cls) -> dict[str, dict[str, object]]:
        """Presets by name."""
        raise NotImplementedError

    @classmethod
    def recipe_in(cls, data: object) -> Any:
        """The recipe that a mapping names, or the default one."""
        return data.get("recipe", cls.model_fields["recipe"].default) if isinstance(data, dict) else None

    @model_validator(mode="before")
    @classmethod
    def _recipe_is_known(cls, data: object) -> object:
        recipe = cls.recipe_in(data)
        if isinstance(data, dict) and (not isinstance(recipe, str) or recipe not in cls.recipes()):
            raise ValueError(f"algorithm.recipe {recipe!r} is not known; known: {', '.join(cls.recipes())}")
        return data


class RecipeRLConfig(RLConfig):
    """A task whose section algorithm has recipes."""

    @classmethod
    def parts(cls) -> type[RecipeAlgorithmConfig]:
        """The class of the section algorithm."""
        return cast("type[RecipeAlgorithmConfig]", cls.model_fields["algorithm"].annotation)

    @classmethod
    def presets(cls, data: JsonObject) -> JsonObject:
        """The parts of the recipe that ``data`` names."""
        recipe = cls.parts().recipe_in(data.get("algorithm") or {})
        is_known = isinstance(recipe, str) and recipe in cls.parts().recipes()
        return {"algorithm": cls.parts().recipes()[recipe]} if is_known else {}

    @classmethod
    def reasons(cls, data: dict[str, object], overrides: dict[str, object]) -> dict[str, str]:
        """Parts that the file sets for its own recipe do not fit the parts of another one."""
        section = data.get("algorithm")
        override = overrides.get("algorithm")
        parts = cls.parts()
        # the file's lines lie over the parts of any recipe, so they would mix with those of the overriding one
        if not isinstance(section, dict) or not isinstance(override, dict):
            return {}
        own_recipe = parts.recipe_in(section)
        recipe = override.get("recipe")
        named = [part for part in section if part in parts.model_fields and part not in {"recipe", *override}]
        if recipe not in list(parts.recipes()) or recipe == own_recipe or not named:
            return {}
        reason = (
            f"--algorithm.recipe {recipe}: the file sets {', '.join(named)} of algorithm for its own recipe, "
            f"{own_recipe}, and what it sets lies over the parts of {recipe}: remove these lines from the file"
        )
        return {"algorithm": reason, **{f"algorithm.{part}": reason for part in named}}
