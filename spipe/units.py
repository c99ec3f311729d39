"""Spec files: units in the keys, converted once, and errors in the words of the file.

Inside, every quantity is in base units and its name says so (``_s``, ``_bytes``, ``_flops``, ``_bytes_per_s``). A file
may use the human unit instead (``latency_us``, ``memory_gib``, ``peak_tflops``, ``bandwidth_gb_per_s``); the tables
here translate keys and values both ways.
"""

import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from spipe.errors import SpipeError, unknown


@dataclass(frozen=True)
class Unit:
    """A human unit: ``base value = human value * multiplier / divisor`` (one of the two is 1: a single rounding)."""

    suffix: str
    meaning: str
    multiplier: float = 1.0
    divisor: float = 1.0

    def to_base(self, value: float) -> float:
        return value * self.multiplier / self.divisor

    def from_base(self, value: float) -> float:
        return value * self.divisor / self.multiplier


# Suffix of the base unit -> human units; the first one is written. The first suffix that fits a field name counts.
UNITS: dict[str, tuple[Unit, ...]] = {
    "_bytes_per_s": (Unit("_gb_per_s", "1e9 bytes per second", multiplier=1e9),),
    "_parameters_per_s": (Unit("_billion_parameters_per_s", "1e9 parameters per second", multiplier=1e9),),
    "_bytes": (
        Unit("_gib", "2**30 bytes", multiplier=2.0**30),
        Unit("_gb", "1e9 bytes", multiplier=1e9),
        Unit("_mib", "2**20 bytes", multiplier=2.0**20),
    ),
    "_flops": (
        Unit("_tflops", "1e12 operations per second", multiplier=1e12),
        Unit("_gflops", "1e9 operations per second", multiplier=1e9),
    ),
    "_s_per_op": (Unit("_us_per_op", "microseconds per op", divisor=1e6),),
    "_s": (Unit("_us", "microseconds", divisor=1e6), Unit("_ms", "milliseconds", divisor=1e3)),
}

KeyPath = tuple[str | int, ...]

_UNIT_WORD = re.compile(
    r"|[kmgt]?i?b(ps|its?)?|bytes?|per|billion|million|param(eter)?s|op|[num]?s|sec(onds?)?|[gmtp]?flops?",
    re.IGNORECASE,
)


_SMALLEST, _LARGEST = 1e-60, 1e60  # of a quantity: what is beyond is a slip, and breaks arithmetic later on


def _real(value: object) -> object:
    """Numbers only: no booleans, no text except the JSON spelling of infinity."""
    if value == "inf":
        return math.inf
    if isinstance(value, bool | str):
        raise ValueError("should be a number")
    if isinstance(value, int | float) and 0 < value < math.inf and not _SMALLEST <= value <= _LARGEST:
        raise ValueError(f"should be {_SMALLEST:g} to {_LARGEST:g} in base units (seconds, bytes, operations)")
    return value


def _flag(value: object) -> object:
    """``true`` or ``false`` only: no text that could be meant as either."""
    if not isinstance(value, bool):
        raise ValueError("should be true or false")
    return value


def _json_number(value: float) -> float | str:
    return "inf" if value == math.inf else value


Flag = Annotated[bool, BeforeValidator(_flag)]
Positive = Annotated[float, BeforeValidator(_real), Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, BeforeValidator(_real), Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, BeforeValidator(_real), Field(gt=0, le=1, allow_inf_nan=False)]
# Positive, and possibly infinite; JSON has no infinity, so it is written as the text "inf" there.
Unlimited = Annotated[float, BeforeValidator(_real), Field(gt=0), PlainSerializer(_json_number, when_used="json")]


class Spec(BaseModel):
    """A frozen, strictly checked description. Every way to build one raises `SpipeError` with a readable message."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    if not TYPE_CHECKING:  # the generated signature stays visible to type checkers

        def __init__(self, **data: Any) -> None:
            try:
                super().__init__(**data)
            except ValidationError as error:
                raise invalid(type(self), error) from None

        # Without this mark pydantic would call __init__ for nested specs, too, and lose the path to the field.
        __init__.__pydantic_base_init__ = True

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise invalid(cls, error) from None

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        try:
            return super().model_validate_json(json_data, **options)
        except ValidationError as error:
            raise invalid(cls, error) from None

    @classmethod
    def from_table(cls, data: Mapping[str, Any], source: str, defaults: Mapping[str, Any] | None = None) -> Self:
        """A spec from a file's table, whose keys may carry human units; messages start with ``source``.

        ``defaults`` (in base units) fill what the table leaves out.
        """
        written: dict[KeyPath, tuple[str, Any]] = {}
        try:
            base = to_base_units(cls, data, (), written)
        except SpipeError as error:
            raise SpipeError(f"{source}: {error}") from None
        try:
            return super().model_validate(cls.changed(defaults or {}, base))
        except ValidationError as error:
            raise invalid(cls, error, source, written) from None

    @classmethod
    def changed(cls, values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        """``values`` of a spec with ``changes`` on top, both in base units."""
        return merged(values, changes)

    def override(self, changes: Mapping[str, Any]) -> Self:
        """A checked copy with single values changed, named as in a file: ``{"accelerator.memory_gib": 24}``."""
        table: dict[str, Any] = {}
        for path, value in changes.items():
            *parents, key = path.split(".")
            owner = table
            for parent in parents:
                owner = owner.setdefault(parent, {})
            owner[key] = value
        return self.from_table(table, "override", self.model_dump())

    def replace(self, **changes: Any) -> Self:
        """A checked copy with some fields changed (``model_copy(update=...)`` does not check)."""
        return type(self)(**{**dict(self), **changes})

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        copied = super().model_copy(update=update, deep=deep)
        _forget_derived(copied.__dict__)
        return copied

    def __getstate__(self) -> dict[Any, Any]:
        state = super().__getstate__()
        return {**state, "__dict__": _forget_derived(dict(state["__dict__"]))}

    @cached_property
    def _hash(self) -> int:
        # Not of the JSON text: Ctrl-C in one of our serializers would come back as another error.
        return hash(str(self.model_dump()))

    def __hash__(self) -> int:
        return self._hash


def _forget_derived(values: dict[str, Any]) -> dict[str, Any]:
    """Without what a spec has worked out from its fields (cached properties): not true of a changed copy, and a hash
    not in another process."""
    for name in [name for name in values if name.startswith("_")]:
        del values[name]
    return values


def units_of(field: str) -> tuple[Unit, ...]:
    """The human units in which a file may give ``field``."""
    return next((units for suffix, units in UNITS.items() if field.endswith(suffix)), ())


def _stem(field: str) -> str:
    return next((field.removesuffix(suffix) for suffix in UNITS if field.endswith(suffix)), field)


def _human_keys(cls: type[BaseModel]) -> dict[str, tuple[str, Unit]]:
    """Key in a file -> (field, unit)."""
    return {_stem(field) + unit.suffix: (field, unit) for field in cls.model_fields for unit in units_of(field)}


def nested_spec(annotation: Any) -> type[Spec] | None:
    """The spec class inside an annotation such as ``Cpu``, ``tuple[Link, ...]`` or ``UnitCost | None``."""
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        return annotation
    return next((found for argument in get_args(annotation) if (found := nested_spec(argument))), None)


def to_base_units(
    cls: type[Spec], data: Mapping[str, Any], path: KeyPath = (), written: dict[KeyPath, tuple[str, Any]] | None = None
) -> dict[str, Any]:
    """The fields of ``cls`` in base units, from a file's table that may use human units.

    ``written`` collects, for each converted field, the key and value as the file has them (for messages).
    """
    keys = _human_keys(cls)
    result: dict[str, Any] = {}
    for key, value in data.items():
        field, unit = keys[key] if key in keys and key not in cls.model_fields else (key, None)
        if field in result:
            raise SpipeError(f"{dotted((*path, key))}: the same quantity is given twice; keep one of its units")
        if unit is not None:
            if written is not None:
                written[(*path, field)] = (key, value)
            result[field] = _scaled(unit.to_base, value)
            continue
        info = cls.model_fields.get(field)
        inner = nested_spec(info.annotation) if info else None
        if inner and isinstance(value, Mapping):
            value = to_base_units(inner, value, (*path, field), written)
        elif inner and isinstance(value, list):
            value = [
                to_base_units(inner, item, (*path, field, i), written) if isinstance(item, Mapping) else item
                for i, item in enumerate(value)
            ]
        result[field] = value
    return result


def to_human_units(spec: Spec) -> dict[str, Any]:
    """A table for a file: human units where the way back is exact to the last bit, base units elsewhere, no nulls."""
    result: dict[str, Any] = {}
    for field in type(spec).model_fields:
        value = getattr(spec, field)
        if value is None or value in ((), {}):
            continue
        if isinstance(value, Spec):
            result[field] = to_human_units(value)
        elif isinstance(value, tuple):
            result[field] = [to_human_units(item) if isinstance(item, Spec) else item for item in value]
        else:
            for unit in units_of(field)[:1]:
                human = _scaled(unit.from_base, value)
                if _scaled(unit.to_base, human) == value:
                    result[_stem(field) + unit.suffix] = human
                    break
            else:
                result[field] = dict(value) if isinstance(value, Mapping) else value
    return result


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes`` on top: tables are merged, everything else is replaced."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def _scaled(convert: Any, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _scaled(convert, item) for key, item in value.items()}
    return convert(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def dotted(path: KeyPath) -> str:
    """``("links", 2, "a")`` -> ``links[2].a``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else str(part))
    return text


def invalid(
    cls: type[BaseModel],
    error: ValidationError,
    source: str = "",
    written: Mapping[KeyPath, tuple[str, Any]] | None = None,
) -> SpipeError:
    """One message for all that is wrong with a spec: the field, its value and what is allowed."""
    found = sorted(error.errors(include_url=False), key=lambda details: details["type"] != "extra_forbidden")
    unknown_keys = [tuple(details["loc"]) for details in found if details["type"] == "extra_forbidden"]
    messages = [
        _message(cls, details, written or {})
        for details in found
        if not (details["type"] == "missing" and _is_misnamed(tuple(details["loc"]), unknown_keys))
    ]
    shown = messages[:5] + ([f"and {len(messages) - 5} more"] if len(messages) > 5 else [])
    return SpipeError(f"{source or cls.__name__}: {'; '.join(shown)}")


def _is_misnamed(missing: KeyPath, unknown_keys: list[KeyPath]) -> bool:
    """Whether the missing field was meant by a key with a wrong unit."""
    return any(key[:-1] == missing[:-1] and _has_wrong_unit(str(key[-1]), str(missing[-1])) for key in unknown_keys)


def _has_wrong_unit(key: str, field: str) -> bool:
    rest = key.removeprefix(_stem(field))
    return bool(units_of(field)) and rest != key and all(map(_UNIT_WORD.fullmatch, rest.split("_")))


def _message(cls: type[BaseModel], details: Any, written: Mapping[KeyPath, tuple[str, Any]]) -> str:
    path: KeyPath = tuple(part for part in details["loc"] if not str(part).startswith("["))
    if details["type"] == "extra_forbidden":
        return _unknown_key(cls, path)
    if details["type"] == "missing":
        units = units_of(str(path[-1]))
        also = "".join(f" or {_stem(str(path[-1])) + unit.suffix!r}" for unit in units)
        return f"{dotted(path)} is missing{f' (write {path[-1]!r}{also})' if also else ''}"
    reason = re.sub(r"^(Value error, )?(Input )?", "", details["msg"])
    reason = re.sub(r"a valid dictionary or instance of \w+", "a table of fields", reason)
    if details["type"] == "value_error" and (not path or isinstance(details["input"], Mapping)):
        reason = _as_written(reason, path, written)
        return f"{dotted(path)}: {reason}" if path else reason
    value = details["input"]
    if path in written:
        key, value = written[path]
        path = (*path[:-1], key)
    elif path[:-1] in written and path[-1] in written[path[:-1]][1]:
        key, table = written[path[:-1]]
        path, value = (*path[:-2], key, path[-1]), table[path[-1]]
    return f"{dotted(path)} = {value!r} {reason}"


def _as_written(reason: str, path: KeyPath, written: Mapping[KeyPath, tuple[str, Any]]) -> str:
    """A reason that compares quantities (``field = value``), in a unit that the file has for one of them."""
    fields = re.findall(r"(\w+) = ", reason)
    keys = [written[(*path, field)][0] for field in fields if (*path, field) in written]

    def human(match: re.Match[str]) -> str:
        field, value = match[1], float(match[2])
        for unit in units_of(field):
            if any(key.endswith(unit.suffix) for key in keys):
                return f"{_stem(field)}{unit.suffix} = {unit.from_base(value):.6g}"
        return match[0]

    return re.sub(r"(\w+) = (inf|[\d.]+(?:e[+-]?\d+)?)", human, reason)


def _unknown_key(cls: type[BaseModel], path: KeyPath) -> str:
    """What to write instead of a key that no field has."""
    owner: type[BaseModel] = cls
    for part in path[:-1]:
        if isinstance(part, str) and part in owner.model_fields:
            owner = nested_spec(owner.model_fields[part].annotation) or owner
    key = str(path[-1])
    for field in owner.model_fields:
        if _has_wrong_unit(key, field):
            allowed = [f"{_stem(field) + unit.suffix!r} ({unit.meaning})" for unit in units_of(field)]
            return f"{dotted(path)}: not a unit for this quantity; write {' or '.join([*allowed, repr(field)])}"
    names = [*owner.model_fields, *_human_keys(owner)]
    where = f"{dotted(path[:-1])}: " if path[:-1] else ""
    return f"{where}{unknown('key', key, names)}"


def read_table(path: Path) -> dict[str, Any]:
    """The top-level table of a TOML or JSON file; errors name the file and, for syntax, the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpipeError(f"cannot read {path}: {error}") from None
    try:
        data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (ValueError, RecursionError) as error:  # also: too many digits, nested too deeply
        raise SpipeError(f"{path}: {error}") from None
    if not isinstance(data, dict):
        raise SpipeError(f"{path}: expected a table of fields, found {type(data).__name__}")
    return data
