"""Tables of published runs: reading them, and the plan that each row ran.

The format is that of the SPipe artifact: a header line ``jobid,name,cluster,model_size,mubs,mbs,nnode,seq,tflops,
elapsed_time_ms,gpu_latency``, title lines such as ``<Figure 9>,,``, and text such as ``CPU OOM`` where a run failed.
Names lose suffix and case: ``Spipe-12`` is SPipe. ``mubs`` is the microbatch and ``mbs`` the global batch in sequences.
"""

import csv
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spipe.errors import SpipeError, unknown
from spipe.hardware import HARDWARE_NAMES, HardwareSpec, load_hardware
from spipe.model import MODELS, ModelSpec
from spipe.plan import Plan, make_plan

COLUMNS = ("name", "cluster", "model_size", "mubs", "mbs", "nnode", "seq", "tflops", "elapsed_time_ms", "gpu_latency")
SYSTEMS: dict[str, tuple[str, int, int]] = {
    "SPipe": ("spipe", 2, 6),
    "Mobius": ("mobius", 2, 2),
    "Megatron": ("1f1b", 2, 2),
}
"""Schedule and stages per rank of the pipelines; DeepSpeed (ZeRO-3) is simulated by ``spipe.sim.zero3``."""
NAMES = (*SYSTEMS, "DeepSpeed")
BUILTIN_CLUSTERS = {"spipe-v100": "v100-cluster", "spipe-3090": "rtx3090-cluster"}
OPTIMIZER_WORKERS = 2
"""STEPs at a time: the published runs' backlogs are worked off faster than one STEP after the other."""


_LARGEST = 2**24  # of a whole number: what a plan takes
_RANKS_PER_HOST = 4
_TFLOPS = 0.2, 3000.0  # of an accelerator; anything else is a time in another unit


@dataclass(frozen=True)
class Run:
    """A row. ``measured_s`` is None where the run failed; ``failure`` then says how."""

    line: int
    figure: str
    system: str
    cluster: str
    model_size: int
    microbatch_size: int
    global_batch: int
    num_hosts: int
    sequence: int
    tflops: float | None
    measured_s: float | None
    gpu_measured_s: float | None
    failure: str = ""

    @property
    def configuration(self) -> tuple[object, ...]:
        """What rows of different systems that ran the same job have in common."""
        return (
            self.figure,
            self.cluster,
            self.model_size,
            self.microbatch_size,
            self.global_batch,
            self.num_hosts,
            self.sequence,
        )

    @property
    def model(self) -> ModelSpec:
        return MODELS[f"{self.model_size}b"]

    def hardware(self, hardware: HardwareSpec) -> HardwareSpec:
        """As many hosts of the cluster as the run used."""
        return hardware.resized(num_hosts=self.num_hosts)

    def plan(self, hardware: HardwareSpec) -> Plan:
        """What the run was: equal cuts, full forward, published options."""
        schedule, forward, backward = SYSTEMS[self.system]
        return make_plan(
            self.model,
            self.hardware(hardware),
            schedule=schedule,
            forward_stages=forward,
            backward_stages=backward,
            global_batch=self.global_batch,
            microbatch_size=self.microbatch_size,
            sequence=self.sequence,
            published=True,
            precision="fp16",
            layer_costs=[0.0, *[1.0] * self.model.num_layers, 0.0],
            options={"optimizer_workers": OPTIMIZER_WORKERS},
        )


@dataclass(frozen=True)
class Selection:
    """Which rows a fit used: ``figure=9,model=10|30``; every named column has to match. ``none`` selects nothing."""

    text: str
    wanted: tuple[tuple[str, frozenset[str]], ...] | None

    FIELDS = ("figure", "model", "system", "cluster", "hosts", "sequence", "microbatch")

    @classmethod
    def parse(cls, text: str) -> "Selection":
        if text.strip().lower() == "none":
            return cls("none", None)
        wanted = []
        for part in text.split(","):
            name, equals, values = part.strip().partition("=")
            if not equals or not values:
                raise SpipeError(
                    f"--fit {text!r}: {part!r} should be NAME=VALUE, for example figure=9,model=10|30, or none"
                )
            if name not in cls.FIELDS:
                raise SpipeError(f"--fit {text!r}: {unknown('column', name, cls.FIELDS)}")
            wanted.append((name, frozenset(value.strip().lower() for value in values.split("|"))))
        return cls(text, tuple(wanted))

    def __contains__(self, run: Run) -> bool:
        if self.wanted is None:
            return False
        values = {
            "figure": run.figure,
            "model": str(run.model_size),
            "system": run.system.lower(),
            "cluster": run.cluster,
            "hosts": str(run.num_hosts),
            "sequence": str(run.sequence),
            "microbatch": str(run.microbatch_size),
        }
        return all(values[name] in allowed for name, allowed in self.wanted)


FITTED_TO = {
    "v100-cluster": Selection.parse("figure=9,model=10|30"),
    "rtx3090-cluster": Selection.parse("model=10"),
}
"""What the constants of the built-in clusters were fitted to."""


def was_fitted_to(run: Run, hardware: HardwareSpec) -> bool:
    """Whether constants of a hardware may come from a run: a built-in cluster with the same accelerators was fitted to
    its row."""
    builtin = BUILTIN_CLUSTERS.get(run.cluster, run.cluster)
    if run not in FITTED_TO.get(builtin, Selection.parse("none")):
        return False
    return load_hardware(builtin).accelerator.name == hardware.accelerator.name


def cluster_hardware(cluster: str) -> HardwareSpec:
    """The built-in hardware of a cluster's name in a table."""
    name = BUILTIN_CLUSTERS.get(cluster, cluster)
    if name not in HARDWARE_NAMES:
        raise unknown("cluster", cluster, BUILTIN_CLUSTERS, "Or say which hardware it is with --hardware.")
    return load_hardware(name)


def read_runs(path: str | Path) -> list[Run]:
    """The rows of a table. Raises SpipeError naming the line, the column and the value of what is wrong."""
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpipeError(f"{path}: cannot read the table ({error})") from None
    try:
        runs = list(_rows(path, lines))
    except csv.Error as error:
        raise SpipeError(f"{path}: not a table of comma-separated values ({error})") from None
    if not runs:
        raise SpipeError(f"{path}: the table has no runs; expected lines below the header {','.join(COLUMNS)}")
    return runs


def _rows(path: Path, lines: list[str]) -> Iterator[Run]:
    reader = csv.reader(lines)
    header = [cell.strip() for cell in next(reader, [])]
    missing = [column for column in COLUMNS if column not in header]
    twice = sorted({column for column in header if column and header.count(column) > 1})
    if twice:
        raise SpipeError(f"{path}: the header has {', '.join(twice)} more than once; leave one column of each")
    if missing and len(header) == 1 and ";" in header[0]:
        raise SpipeError(f"{path}: the cells are divided by semicolons; divide them by commas")
    if missing:
        raise SpipeError(
            f"{path}: the header lacks {', '.join(missing)}; found {', '.join(filter(None, header)) or 'nothing'} "
            "(times are expected in milliseconds, under exactly these names)"
        )
    figure = ""
    for cells in reader:
        where = f"{path}, line {reader.line_num}"
        if not any(cell.strip() for cell in cells):
            continue
        title = re.fullmatch(r"<(?:Figure )?(.*)>", cells[0].strip())
        if title:
            figure = title[1].strip()
            continue
        if len(cells) != len(header):
            raise SpipeError(f"{where}: {len(cells)} cells, but the header has {len(header)}")
        yield _run(where, reader.line_num, figure, dict(zip(header, (cell.strip() for cell in cells), strict=True)))


def _run(where: str, line: int, figure: str, row: dict[str, str]) -> Run:
    def number(column: str) -> float:
        try:
            value = float(row[column])
        except ValueError:
            also = ", nor text that ends in OOM" if column == "elapsed_time_ms" else ""
            raise SpipeError(f"{where}: {column} = {row[column]!r} is not a number{also}") from None
        if not (math.isfinite(value) and value > 0):
            raise SpipeError(f"{where}: {column} = {row[column]} should be more than 0 and finite")
        return value

    def whole(column: str) -> int:
        value = number(column)
        if value != int(value) or value > _LARGEST:
            raise SpipeError(f"{where}: {column} = {row[column]} should be a whole number of 1 to {_LARGEST}")
        return int(value)

    known = {name.lower(): name for name in NAMES}
    system = row["name"].split("-")[0].lower()
    if system not in known:
        raise SpipeError(f"{where}: {unknown('system', row['name'], NAMES)}")
    size, elapsed = whole("model_size"), row["elapsed_time_ms"]
    if f"{size}b" not in MODELS:
        sizes = [name[:-1] for name in MODELS if re.fullmatch(r"\d+b", name)]
        raise SpipeError(f"{where}: model_size = {size}: known are {', '.join(sizes)} (billions of parameters)")
    failed = bool(re.fullmatch(r"[A-Za-z ]*OOM", elapsed))
    run = Run(
        line=line,
        figure=figure,
        system=known[system],
        cluster=row["cluster"],
        model_size=size,
        microbatch_size=whole("mubs"),
        global_batch=whole("mbs"),
        num_hosts=whole("nnode"),
        sequence=whole("seq"),
        tflops=number("tflops") if row["tflops"] else None,
        measured_s=None if failed else number("elapsed_time_ms") * 1e-3,
        gpu_measured_s=number("gpu_latency") * 1e-3 if row["gpu_latency"] and not failed else None,
        failure=elapsed if failed else "",
    )
    _check(where, run)
    return run


def _check(where: str, run: Run) -> None:
    if run.global_batch % run.microbatch_size:
        raise SpipeError(
            f"{where}: mbs = {run.global_batch} (the global batch) does not divide by mubs = {run.microbatch_size}"
        )
    if run.measured_s is None:
        return
    if run.gpu_measured_s is not None and run.gpu_measured_s > run.measured_s:
        raise SpipeError(
            f"{where}: gpu_latency = {run.gpu_measured_s * 1e3:g} should not exceed elapsed_time_ms = "
            f"{run.measured_s * 1e3:g}; both are in milliseconds"
        )
    flops = run.model.model_flops_per_token(run.sequence) * run.global_batch * run.sequence
    implied = flops / (run.measured_s * _RANKS_PER_HOST * run.num_hosts * 1e12)
    text = f"{where}: elapsed_time_ms = {run.measured_s * 1e3:g} means {implied:.4g} TFLOP/s a GPU, "
    if run.tflops is not None and not 0.5 < implied / run.tflops < 2:
        raise SpipeError(f"{text}but tflops = {run.tflops:g}; is the time in milliseconds?")
    low, high = _TFLOPS
    if not low < implied < high:
        raise SpipeError(f"{text}which should be {low:g} to {high:g}; is the time in milliseconds?")
