"""Hardware specs: accelerators, host CPUs and memory, and the links between them (``spipe.topology``).

On device ``cpu`` a rank is a few cores of the host, and its node is still called ``gpu``.
"""

import datetime
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import BeforeValidator, Field, model_validator

from spipe.errors import SpipeError, unknown
from spipe.layer_list import Model
from spipe.model import LayerKind, ModelSpec, PassName
from spipe.topology import Edge, Link, Place, Route, Text, Topology, topology
from spipe.units import (
    Flag,
    Fraction,
    NonNegative,
    Positive,
    Spec,
    Unlimited,
    nested_spec,
    read_table,
    to_base_units,
    to_human_units,
)

Dtype = Literal["fp32", "bf16", "fp16"]
Provenance = Literal["assumed", "published", "fitted", "measured"]

Count = Annotated[int, Field(strict=True, ge=1, le=2**16)]
CountOrZero = Annotated[int, Field(strict=True, ge=0)]


class Accelerator(Spec):
    """What computes: a GPU, or on device ``cpu`` the cores of one rank."""

    name: Text
    memory_bytes: Unlimited
    usable_fraction: Fraction = 0.95
    """Part of the memory left for the program (the rest: context, communication buffers, fragmentation)."""
    memory_bandwidth_bytes_per_s: Unlimited
    peak_flops: Annotated[dict[Dtype, Unlimited], Field(min_length=1)]
    """Vendor's dense peak by dtype; a dtype that is left out is not supported."""
    max_efficiency: Fraction = 0.7
    """Part of the peak that large matrix products reach."""
    half_efficiency_tokens: NonNegative = 0.0
    """Tokens at which half of ``max_efficiency`` is reached where the hidden size is far larger, or the reverse."""
    launch_overhead_s: NonNegative = 0.0
    """Time in which the host issues one op."""
    layer_issue_s: dict[Literal["forward", "recompute", "backward"], NonNegative] = Field(default_factory=dict)
    """Time in which the host issues a pass of a block or head, on a GPU."""
    op_issue_s: dict[Literal["forward", "recompute", "backward"], NonNegative] = Field(default_factory=dict)
    """What a compute op takes the host beyond that, however many layers it has. A forward takes no less than both
    together; nor do a recompute and its backward, which are issued in turns."""
    compute_threads: Count = 1
    """Device ``cpu``: cores that one rank computes with."""

    @property
    def usable_memory_bytes(self) -> float:
        return self.memory_bytes * self.usable_fraction

    def efficiency(self, tokens: float, hidden_size: float) -> float:
        """Part of the peak that matrix products of a microbatch reach: the larger on both sides, the more.

        ``max_efficiency / (1 + half_efficiency_tokens * (1 / tokens + 1 / hidden_size))``
        """
        if tokens <= 0:
            return 0.0
        return self.max_efficiency / (1 + self.half_efficiency_tokens * (1 / tokens + 1 / hidden_size))

    def peak(self, dtype: str) -> float:
        """Peak operations per second in ``dtype``."""
        for known, flops in self.peak_flops.items():
            if known == dtype:
                return flops
        raise SpipeError(f"dtype {dtype!r}: {self.name} computes in {', '.join(self.peak_flops)} only")


class Cpu(Spec):
    """The cores and memory of one host (all sockets together)."""

    name: Text
    num_domains: Count = 1
    """NUMA domains. Cores and memory are shared by domain where the links name a memory for each (``memory0``, ..)."""
    cores: Count
    memory_bytes: Unlimited
    usable_memory_bytes: Unlimited
    """What the program may hold (parameters, gradients, optimizer state)."""
    memory_bandwidth_bytes_per_s: Unlimited
    """Of all domains together; shared by the optimizer and by copies."""
    adam_parameters_per_s: Unlimited
    """Parameters that all cores step per second while nothing else runs, keeping a log to undo the step."""
    undo_slowdown: Annotated[float, Field(ge=1, le=4, allow_inf_nan=False)] = 1.0
    """By what a step without that log (optimizer ``sync``) is faster."""
    adam_s_per_op: NonNegative = 0.0
    """Fixed cost of one optimizer op."""
    page_lock_bytes_per_s: Positive | None = None
    """Speed at which memory is page-locked, once at the start."""
    page_locked: Flag = True
    """Whether accelerators copy from and to weights, gradients and activations in host memory directly. If not, a core
    copies every piece to or from a page-locked buffer first."""
    pageable_bytes_per_s: Positive | None = None
    """Bandwidth of an accelerator's copy from or to pageable memory."""
    process_bytes: Positive | None = None
    """Host memory that the process of a rank takes by itself."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.usable_memory_bytes > self.memory_bytes:
            raise ValueError(
                f"usable_memory_bytes = {self.usable_memory_bytes:.6g} should not exceed "
                f"memory_bytes = {self.memory_bytes:.6g}"
            )
        if not self.page_locked and self.pageable_bytes_per_s is None:
            raise ValueError(
                "page_locked = false needs pageable_bytes_per_s: how fast an accelerator copies from pageable memory"
            )
        if self.num_domains > self.cores:
            raise ValueError(f"num_domains = {self.num_domains} should not exceed cores = {self.cores}")
        return self


class UnitCost(Spec):
    """An idealised device for checks against closed formulas: every block costs the same, whatever its size, and each
    part of a split one half of it.

    Embedding, head and optimizer take no time.
    """

    unit_block_s: Positive = 1e-3
    """Forward pass of one block for one microbatch."""
    recompute_factor: NonNegative = 1.0
    backward_factor: NonNegative = 2.0

    def layer_s(self, kind: str, pass_name: PassName) -> float:
        """Seconds of one pass of one layer for one microbatch."""
        share = {"block": 1.0, "attention": 0.5, "mlp": 0.5}.get(kind, 0.0)
        factors = {"forward": 1.0, "recompute": self.recompute_factor, "backward": self.backward_factor}
        return share * self.unit_block_s * factors[pass_name]


def _date(value: object) -> object:
    """A month or a day, which TOML has a type for, as text."""
    text = value.strftime("%Y-%m-%d") if isinstance(value, datetime.date) else value
    try:
        if isinstance(text, str) and re.fullmatch(r"\d{4}-\d\d(-\d\d)?", text):
            datetime.date.fromisoformat(f"{text}-01"[:10])
            return text
    except ValueError:
        pass
    raise ValueError("should be a month or a day, such as 2026-05 or 2026-05-31")


class Price(Spec):
    """What one host with its accelerators costs, at a date: an example to calculate with, not an offer."""

    date: Annotated[str, BeforeValidator(_date)]
    """When it was set down, as ``2026-05`` or ``2026-05-31``."""
    note: Text
    purchase_dollars: NonNegative | None = None
    power_watts: NonNegative = 0.0
    """While training."""
    electricity_dollars_per_kwh: NonNegative = 0.0
    rent_dollars_per_hour: NonNegative | None = None
    upgrade_dollars: dict[str, NonNegative] = Field(default_factory=dict)
    """Prices of upgrades of a host (see ``spipe whatif``), by name."""

    @property
    def power_dollars_per_hour(self) -> float:
        """Electricity of one host."""
        return self.power_watts / 1000 * self.electricity_dollars_per_kwh


def standard_error(spread: float, num_samples: int) -> float:
    """Of the median of independent normal samples whose middle half is ``2 spread`` wide."""
    return 1.8583 * spread / math.sqrt(num_samples)  # sqrt(pi / 2) / 0.6745


class MeasuredLayer(Spec):
    """Measured time of one pass of one layer for one microbatch; shape fields that do not matter are 0."""

    layer_kind: LayerKind
    pass_name: PassName
    microbatch_size: Count
    sequence: Annotated[int, Field(strict=True, ge=1)]
    dtype: Dtype
    hidden_size: CountOrZero
    ffn_size: CountOrZero = 0
    num_heads: CountOrZero = 0
    num_kv_heads: CountOrZero = 0
    vocab_size: CountOrZero = 0
    seconds: NonNegative
    spread_s: NonNegative = 0.0
    """Half the width of the middle half of the samples."""
    num_samples: Count = 1
    source: Literal["run", "profile"] = "run"
    """Measured in training steps, or on its own."""

    @property
    def key(self) -> tuple[object, ...]:
        """What was measured, without the value."""
        return tuple(value for name, value in self if name not in ("seconds", "spread_s", "num_samples", "source"))

    @property
    def standard_error_s(self) -> float:
        """Of the median, if its samples are independent and normal."""
        return standard_error(self.spread_s, self.num_samples)

    @staticmethod
    def shape_of(model: ModelSpec, kind: str) -> dict[str, int]:
        """The shape fields that matter for a layer of ``model``, the others 0."""
        attends, feeds = kind in ("block", "attention"), kind in ("block", "mlp")
        return {
            "hidden_size": model.hidden_size,
            "ffn_size": model.ffn_size if feeds else 0,
            "num_heads": model.num_heads if attends else 0,
            "num_kv_heads": model.num_kv_heads if attends else 0,
            "vocab_size": 0 if attends or feeds else model.vocab_size,
        }


class HardwareSpec(Spec):
    """Hosts that are all alike, their accelerators and the links between everything."""

    schema_version: Literal[1] = 1
    name: Text
    device: Literal["cuda", "cpu"]
    note: str = ""
    """Where the numbers come from."""
    num_hosts: Annotated[int, Field(strict=True, ge=1, le=1024)] = 1
    ranks_per_host: Annotated[int, Field(strict=True, ge=1, le=256)]
    peer_to_peer: Flag
    """Accelerators of a host copy to each other directly, not through host memory."""
    gpu_direct_rdma: Flag = False
    """Network cards read and write accelerator memory directly; otherwise data bounces through host memory."""
    staging_piece_bytes: NonNegative = 0.0
    """Pieces in which data moves that is staged in host memory; 0: so fine that its hops overlap completely."""
    accelerator: Accelerator
    cpu: Cpu
    links: tuple[Link, ...]
    unit_cost: UnitCost | None = None
    price: Price | None = None
    """Of one host."""
    measured: tuple[MeasuredLayer, ...] = ()
    measured_op_overhead_s: dict[str, NonNegative] = Field(default_factory=dict)
    """Measured fixed cost by op kind."""
    provenance: dict[str, Provenance] = Field(default_factory=dict)
    """Where a value comes from, by dotted field name."""
    uncertainty: dict[str, NonNegative] = Field(default_factory=dict)
    """Relative standard error of a measured or fitted value, by dotted field name."""
    prediction_error: NonNegative = 0.0
    """Relative standard error of predicted step times, as far as runs have shown it; 0: not known."""

    @classmethod
    def changed(cls, values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        """``values`` with ``changes`` on top: of a host's memory that changes in size, the same part stays usable."""
        result = super().changed(values, changes)
        match values.get("cpu"), changes.get("cpu"):
            case (
                {"memory_bytes": int() | float() as old, "usable_memory_bytes": int() | float() as usable},
                {"memory_bytes": int() | float() as new, **others},
            ) if old > 0 and "usable_memory_bytes" not in others:
                result["cpu"]["usable_memory_bytes"] = new if math.isinf(old) else usable / old * new
        return result

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.links:
            raise ValueError("links = [] should have a link from gpu* towards memory at least")
        ends = [frozenset((link.a, link.b)) for link in self.links]
        for link, pair in zip(self.links, ends, strict=True):
            if ends.count(pair) > 1:
                raise ValueError(f"links has {link.a} - {link.b} more than once; give one link with all its bandwidth")
        if self.unit_cost is None:
            for path, value in _numbers(self):
                if value == math.inf:
                    raise ValueError(f"{path} = inf: only hardware with a [unit_cost] section may be unlimited")
        for name in ("provenance", "uncertainty"):
            for path in getattr(self, name):
                _check_field_path(path, name)
        threads, cores = self.accelerator.compute_threads, self.cpu.cores
        if self.device == "cpu" and threads > cores:
            raise ValueError(f"accelerator.compute_threads = {threads} should not exceed cpu.cores = {cores}")
        topology, last = self.topology, self.num_hosts - 1
        for rank in self.ranks_of(last):
            topology.route(("gpu", rank), ("memory", last))
        for rank in {0, self.num_ranks - 1}:
            topology.route(("memory", 0), ("gpu", rank))
        return self

    @property
    def num_ranks(self) -> int:
        return self.num_hosts * self.ranks_per_host

    def host_of(self, rank: int) -> int:
        """The host that holds ``rank``: ranks are numbered host by host."""
        if not 0 <= rank < self.num_ranks:
            raise SpipeError(f"rank {rank} of hardware {self.name}: should be 0 to {self.num_ranks - 1}")
        return rank // self.ranks_per_host

    def ranks_of(self, host: int) -> range:
        return range(host * self.ranks_per_host, (host + 1) * self.ranks_per_host)

    @property
    def topology(self) -> Topology:
        """The expanded graph of links. Keep it in a variable where routes are looked up often."""
        return topology(
            self.links,
            self.num_hosts,
            self.ranks_per_host,
            self.peer_to_peer,
            self.gpu_direct_rdma,
            self.staging_piece_bytes,
        )

    def edges(self) -> tuple[Edge, ...]:
        """All capacities that transfers share, by edge number."""
        return self.topology.edges

    def route(self, source: Place, target: Place) -> Route:
        """How data travels from one place, ``("gpu", rank)`` or ``("memory", host)``, to another."""
        return self.topology.route(source, target)

    def resized(self, num_hosts: int | None = None, ranks_per_host: int | None = None) -> Self:
        """The same kind of hosts, in other numbers (the host's CPU and memory stay as they are)."""
        return self.replace(
            num_hosts=self.num_hosts if num_hosts is None else num_hosts,
            ranks_per_host=self.ranks_per_host if ranks_per_host is None else ranks_per_host,
        )

    def find_measured(
        self,
        model: Model,
        layer_kind: str,
        pass_name: PassName,
        microbatch_size: int,
        sequence: int,
        dtype: str,
    ) -> MeasuredLayer | None:
        """The measurement of exactly this layer, pass, shape and dtype, if there is one."""
        if not isinstance(model, ModelSpec):
            return None
        shape = MeasuredLayer.shape_of(model, layer_kind)
        wanted = (layer_kind, pass_name, microbatch_size, sequence, dtype, *shape.values())
        for entry in self.measured:
            found = (entry.layer_kind, entry.pass_name, entry.microbatch_size, entry.sequence, entry.dtype)
            if (*found, *(getattr(entry, field) for field in shape)) == wanted:
                return entry
        return None

    def save(self, path: str | Path) -> None:
        """Writes a TOML file that `load_hardware` reads back to an equal spec, to the last bit."""
        Path(path).write_text(tomli_w.dumps(to_human_units(self), multiline_strings=True), encoding="utf-8")


def _numbers(spec: Spec, path: str = "") -> Iterator[tuple[str, float]]:
    for field in type(spec).model_fields:
        value = getattr(spec, field)
        items: Iterable[tuple[str, Any]] = [(field, value)]
        if isinstance(value, tuple):
            items = ((f"{field}[{i}]", item) for i, item in enumerate(value))
        elif isinstance(value, Mapping):
            items = ((f"{field}.{key}", item) for key, item in value.items())
        for name, item in items:
            if isinstance(item, Spec):
                yield from _numbers(item, f"{path}{name}.")
            elif isinstance(item, float):
                yield path + name, item


def _check_field_path(path: str, where: str) -> None:
    owner: type[Spec] | None = HardwareSpec
    for part in path.split("."):
        name = re.sub(r"\[\d+\]$", "", part)
        if owner is None:
            return  # a key of a table such as accelerator.peak_flops
        if name not in owner.model_fields:
            raise ValueError(f"{where} of {path!r}: {unknown('field', name, owner.model_fields)}")
        owner = nested_spec(owner.model_fields[name].annotation)


# Files

_DATA = files("spipe") / "hardware_data"
HARDWARE_NAMES: tuple[str, ...] = tuple(
    sorted(entry.name.removesuffix(".toml") for entry in _DATA.iterdir() if entry.name.endswith(".toml"))
)


def load_hardware(name_or_path: str | Path) -> HardwareSpec:
    """A built-in hardware by name, or one from a TOML (or JSON) file.

    A file may start from another one with ``extends = "<built-in name or path>"``: tables are merged, lists and single
    values replaced. Where ``cpu.memory_...`` changes alone, the same part of it stays usable.
    """
    text = str(name_or_path)
    if text in HARDWARE_NAMES:
        return _builtin(text)
    path = Path(name_or_path)
    if not path.is_file():
        if path.is_dir():
            raise SpipeError(f"hardware {text!r} is a folder; give a name or the path of a .toml file")
        if path.suffix in (".toml", ".json") or "/" in text:
            raise SpipeError(f"hardware {text!r}: there is no such file")
        raise unknown("hardware", text, HARDWARE_NAMES, "Or give a path to a .toml file.")
    return _parse(path, text)


@cache
def _builtin(name: str) -> HardwareSpec:
    return _parse(_builtin_path(name), f"hardware {name}")


def _builtin_path(name: str) -> Path:
    return Path(str(_DATA / f"{name}.toml"))


def _parse(path: Path, source: str) -> HardwareSpec:
    data, inherited = _read(path, ())
    return HardwareSpec.from_table({"name": path.stem} | data, source, inherited)


def _read(path: Path, seen: tuple[Path, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The table of a file, and in base units what it inherits by ``extends``."""
    if path.resolve() in seen:
        raise SpipeError(f"{path}: extends itself by way of {', '.join(str(other) for other in seen)}")
    data = read_table(path)
    base = data.pop("extends", None)
    if base is None:
        return data, {}
    if not isinstance(base, str):
        raise SpipeError(f"{path}: extends = {base!r} should be the name or path of a hardware")
    if base in HARDWARE_NAMES:
        base_path = _builtin_path(base)
    elif (path.parent / base).is_file():
        base_path = path.parent / base
    else:
        raise SpipeError(f"{path}: extends: {unknown('hardware', base, HARDWARE_NAMES, 'Or give a path.')}")
    base_data, inherited = _read(base_path, (*seen, path.resolve()))
    try:
        return data, HardwareSpec.changed(inherited, to_base_units(HardwareSpec, base_data))
    except SpipeError as error:
        raise SpipeError(f"{base_path}: {error}") from None
