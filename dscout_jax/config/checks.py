"""Checked values: every error names the dotted field, the value given and what is allowed."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any


class ConfigError(ValueError):
    """A configuration value that cannot be used; the message is one line for the user."""


def require(condition: bool, field: str, value: Any, allowed: str) -> None:
    """Raises ConfigError naming `field`, `value` and what is `allowed` unless `condition`."""
    if not condition:
        raise ConfigError(f"{field}={value!r} is not allowed; use {allowed}")


def require_positive(config: Any, section: str, *, besides: tuple[str, ...] = ()) -> None:
    """Checks every number of a section but `besides` to be above 0."""
    for name, value in vars(config).items():
        if name not in besides and isinstance(value, int | float) and not isinstance(value, bool):
            require(value > 0, f"{section}.{name}", value, "a number above 0")


def to_dict(config: Any) -> dict[str, Any]:
    """Returns the nested plain dict of a config dataclass (tuples become lists)."""
    return _plain(dataclasses.asdict(config))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def build(cls: type, values: Mapping[str, Any], path: str = "") -> Any:
    """Returns a config dataclass made of a nested mapping; `path` is the dotted name of it.

    Raises:
        ConfigError: an unknown or missing field, a wrong type, or a value out of range.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for name in values:
        if name not in fields:
            raise ConfigError(f"{path}{name} is not a field; allowed here: {', '.join(fields)}")
    arguments = {}
    for name, field in fields.items():
        dotted = f"{path}{name}"
        if name in values:
            arguments[name] = _convert(hints[name], values[name], dotted)
        elif field.default is dataclasses.MISSING:
            raise ConfigError(f"{dotted} is missing; it has no default")
    return cls(**arguments)


def _convert(hint: Any, value: Any, dotted: str) -> Any:
    if dataclasses.is_dataclass(hint):
        require(isinstance(value, Mapping), dotted, value, "a section with fields")
        return build(hint, value, f"{dotted}.")
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    if typing.get_origin(hint) is tuple:
        require(isinstance(value, tuple | list), dotted, value, "a tuple")
        item = typing.get_args(hint)
        kinds = [item[0]] * len(value) if len(item) == 2 and item[1] is Ellipsis else list(item)
        require(len(kinds) == len(value), dotted, value, f"a tuple of {len(kinds)} values")
        return tuple(
            _convert(kind, element, dotted) for kind, element in zip(kinds, value, strict=True)
        )
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    kind_ok = isinstance(value, hint) and not (hint is int and isinstance(value, bool))
    require(kind_ok, dotted, value, f"a value of type {hint.__name__}")
    return value
