"""Profiles: what was measured on a machine, sample by sample. ``spipe.sim.profiled`` makes a hardware spec of one."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from spipe.errors import SpipeError

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Sample:
    """One thing that was measured again and again.

    Attributes:
        what: ``layer``, ``matmul``, ``copy``, ``peer copy``, ``device copy``, ``triad``, ``adam``, ``page lock``,
            ``issue``.
        about: what else it depends on, by name: bytes, direction, threads, shape.
        seconds: of every repetition.
    """

    what: str
    about: dict[str, Any]
    seconds: tuple[float, ...]


@dataclass
class Profile:
    """Facts about a machine and samples of its speed; ``notes`` say what could not be measured, and why."""

    machine: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def find(self, what: str, **about: Any) -> list[Sample]:
        """Samples of a kind that have these values."""
        wanted = about.items()
        return [s for s in self.samples if s.what == what and all(s.about.get(key) == value for key, value in wanted)]

    def to_json(self) -> dict[str, Any]:
        """What ``load`` reads back from a file."""
        return {
            "spipe_profile": SCHEMA_VERSION,
            "machine": self.machine,
            "samples": [asdict(sample) for sample in self.samples],
            "notes": self.notes,
        }

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        """Read a profile. Raises SpipeError for anything else."""
        try:
            data = json.loads(Path(path).read_text())
            if data["spipe_profile"] != SCHEMA_VERSION:
                raise ValueError(f"version {data['spipe_profile']!r}, this version reads {SCHEMA_VERSION}")
            samples = [Sample(each["what"], dict(each["about"]), _seconds(each["seconds"])) for each in data["samples"]]
            return cls(dict(data["machine"]), samples, list(data["notes"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise SpipeError(f"{path}: not a profile ({error}); make one with `spipe profile --json`") from None


def _seconds(values: Iterable[Any]) -> tuple[float, ...]:
    seconds = tuple(float(value) for value in values)
    if not seconds or not all(0 <= value < float("inf") for value in seconds):
        raise ValueError(f"seconds = {list(seconds)[:4]} should be at least one finite number >= 0")
    return seconds


def shape_text(about: Mapping[str, Any]) -> str:
    """A layer's shape in words."""
    return f"{about['microbatch_size']} x {about['sequence']} {about['dtype']}, hidden {about['hidden_size']}"
