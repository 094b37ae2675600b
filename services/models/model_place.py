"""Values of `--model`: a place of a model, with or without a name to serve it under."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..runtime.model_name import check_model_name
from ..runtime.settings import SettingError, require


@dataclass(frozen=True, slots=True)
class ModelPlace:
    place: str
    """Demo model, Hugging Face id, model folder or .gguf file."""
    name: str | None
    """Name that clients send; None: the model's own."""


def read_places(given: tuple[str, ...]) -> tuple[ModelPlace, ...]:
    """Parses the values of `--model`, `PLACE` or `NAME=PLACE`. Raises `SettingError` for no value,
    for an invalid name, and for two models with one name."""
    require(given, "model", None, "at least one")
    places = tuple(map(_read, given))
    for i, place in enumerate(places):
        if place in places[:i] or (place.name and place.name in _names(places[:i])):
            raise SettingError("model", given[i], "models with names of their own, as NAME=MODEL")
    return places


def check_models(
    given: tuple[str, ...], served_model_name: str | None, revision: str | None
) -> None:
    """Raises as `read_places`, and for one name or one revision beside several models."""
    places = read_places(given)
    if len(places) > 1:
        allowed = "none with several models; NAME=MODEL names each"
        require(served_model_name is None, "served_model_name", served_model_name, allowed)
        require(revision is None, "revision", revision, allowed)
    elif places[0].name is not None:
        allowed = "none with NAME=MODEL"
        require(served_model_name is None, "served_model_name", served_model_name, allowed)


def _read(value: str) -> ModelPlace:
    name, is_named, place = value.partition("=")
    if not is_named or Path(value).exists():
        name, place = "", value
    else:
        check_model_name("model", name)
    require(place, "model", value, "a model, or NAME=MODEL")
    return ModelPlace(place, name or None)


def _names(places: tuple[ModelPlace, ...]) -> set[str | None]:
    return {place.name for place in places}
