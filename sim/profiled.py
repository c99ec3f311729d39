"""A hardware spec from a profile: medians of what was measured, each with its standard error."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from spipe.errors import SpipeError
from spipe.hardware import HardwareSpec, MeasuredLayer, standard_error
from spipe.model import LayerKind, ModelSpec, PassName
from spipe.profile import Profile, Sample, shape_text
from spipe.sim.cost import CostModel
from spipe.sim.fitting import Prior, Samples, nonnegative_fit
from spipe.topology import Link

UNDISTURBED = 0.9
"""Least share of the processor that all threads of an idle machine have."""
WIDE = 0.1
"""A relative spread beyond this is worth a warning."""
_USABLE = 0.95  # of the memory that was free
_NVLINK = 1.3  # a copy between GPUs so many times as fast as one to the host does not go through PCIe
_SHARED = 0.95  # copies of all GPUs at once that reach less of their sum share a link
_MOST_OF_A_LOG = 1.5  # 12 bytes of log beside the 24 of optimizer state and those of weight and gradient
_TOKENS = {"cuda": 100.0, "cpu": 32.0}  # half_efficiency_tokens where one shape cannot tell it


def hardware_of(profile: Profile, name: str) -> HardwareSpec:
    """The machine that was profiled.

    Raises:
        SpipeError: if the profile lacks what no spec can be without.
    """
    return _Assembly(profile, name).hardware()


def warnings_of(profile: Profile) -> list[str]:
    """What makes a profile doubtful, with the evidence."""
    found = list(profile.notes)
    shares = [s.about["processor_share"] for s in profile.samples if "processor_share" in s.about]
    if shares and min(shares) < UNDISTURBED:
        found.append(
            f"something else uses the processor: our threads had {min(shares):.0%} of it while they worked; profile an "
            "idle machine"
        )
    wide = [(Samples.of(s.seconds), s) for s in profile.samples]
    wide = [(samples, s) for samples, s in wide if samples.median > 1e-4 and samples.spread > WIDE * samples.median]
    for samples, sample in sorted(wide, key=lambda pair: -pair[0].spread / pair[0].median)[:5]:
        found.append(
            f"{sample_text(sample)} varies: {1e3 * samples.median:.4g} ms, give or take "
            f"{samples.spread / samples.median:.0%}"
        )
    if len(wide) > 5:
        found.append(f"and {len(wide) - 5} more measurements vary by more than {WIDE:.0%}")
    return found


def sample_text(sample: Sample) -> str:
    """What was measured, in words."""
    about = sample.about
    if sample.what == "layer":
        return f"{about['layer_kind']} {about['pass_name']}, {shape_text(about)}"
    return f"{sample.what} ({', '.join(f'{key} {value}' for key, value in about.items())})"


class _Assembly:
    def __init__(self, profile: Profile, name: str) -> None:
        self.profile, self.name, self.machine = profile, name, profile.machine
        self.on_cpu = self.machine["device"] == "cpu"
        told = ("cpu.cores", "cpu.num_domains", "cpu.memory_bytes", "accelerator.memory_bytes", "links[0].latency_s")
        self.provenance: dict[str, str] = dict.fromkeys(told, "measured")
        if "process_bytes" in self.machine:
            self.provenance["cpu.process_bytes"] = "measured"
        self.uncertainty: dict[str, float] = {}

    def hardware(self) -> HardwareSpec:
        peaks = {s.about["dtype"]: s.about["flops"] / median(s.seconds) for s in self.profile.find("matmul")}
        layers = self.profile.find("layer")
        if not peaks or not layers:
            raise SpipeError("the profile has no layers or no matrix products; profile again")
        links = self.cpu_links() if self.on_cpu else self.gpu_links()
        self.note("accelerator.peak_flops", self.profile.find("matmul")[:1])
        gpus = self.machine["gpus"]
        accelerator: dict[str, Any] = {
            "name": "one core" if self.on_cpu else gpus[0]["name"],
            "memory_bytes": self.usable_host_bytes if self.on_cpu else min(gpu["memory_bytes"] for gpu in gpus),
            "usable_fraction": 1.0 if self.on_cpu else 0.95,
            "memory_bandwidth_bytes_per_s": self.accelerator_memory(),
            "peak_flops": peaks,
            "max_efficiency": 1.0,
            "half_efficiency_tokens": 0.0,
            "launch_overhead_s": self.of("accelerator.launch_overhead_s", self.of_an_op),
            "layer_issue_s": {
                s.about["pass_name"]: median(s.seconds) for s in self.profile.find("issue") if "pass_name" in s.about
            },
            "compute_threads": self.machine["compute_threads"] if self.on_cpu else 1,
        }
        spec = HardwareSpec.model_validate(
            {
                "name": self.name,
                "device": self.machine["device"],
                "note": self.summary(),
                "ranks_per_host": self.machine["cores"] if self.on_cpu else len(gpus),
                "peer_to_peer": not self.on_cpu and bool(self.machine.get("peer_access")),
                "accelerator": accelerator,
                "cpu": self.cpu(),
                "links": links,
                "provenance": self.provenance,
                "uncertainty": self.uncertainty,
            }
        )
        spec = with_efficiency(spec, layers)
        return spec.replace(
            measured=tuple(_entry(sample) for sample in layers),
            provenance={**spec.provenance, "measured": "measured"},
        )

    @property
    def of_an_op(self) -> list[Sample]:
        """What the host does for an op, its layers left out."""
        return self.profile.find("issue") if self.on_cpu else self.profile.find("issue", replayed=True)

    def of(self, field: str, samples: Sequence[Sample]) -> float:
        """The median of what was measured for a field; its standard error goes into the spec."""
        self.note(field, samples)
        return median(samples[0].seconds) if samples else 0.0

    def note(self, field: str, samples: Sequence[Sample]) -> None:
        if samples:
            self.provenance[field] = "measured"
            self.uncertainty[field] = _relative_error(samples[0])

    def summary(self) -> str:
        machine = self.machine
        parts = [f"{machine['cpu']}, {machine['cores']} cores, {len(machine['numa_domains']) or 1} NUMA domains"]
        if machine["gpus"]:
            parts.append(f"{len(machine['gpus'])} x {machine['gpus'][0]['name']}")
        return f"Profiled {machine['date']}: {'; '.join(parts)}; torch {machine['torch']}"

    # ------------------------------------------------------------------ host

    @property
    def usable_host_bytes(self) -> float:
        return _USABLE * float(self.machine["available_bytes"])

    def cpu(self) -> dict[str, Any]:
        cores = self.machine["cores"]
        most = max((s.about["threads"] for s in self.profile.find("adam")), default=cores)
        steps = self.profile.find("adam", threads=most)
        alone = [s for s in steps if not s.about.get("beside_copies") and s.about.get("undo", True)]
        without_undo = self.profile.find("adam", threads=most, undo=False)
        if not alone:
            raise SpipeError("the profile has no optimizer steps; profile again where there is memory for them")
        large = max(alone, key=lambda s: float(s.about["parameters"]))
        small = min(alone, key=lambda s: float(s.about["parameters"]))
        fixed_s = median(small.seconds) if small is not large else 0.0
        rate = large.about["parameters"] / max(median(large.seconds) - fixed_s, 0.5 * median(large.seconds))
        self.note("cpu.adam_parameters_per_s", [large])
        self.note("cpu.adam_s_per_op", [small])
        self.note("cpu.memory_bandwidth_bytes_per_s", [large])
        locks = self.profile.find("page lock")
        pageable = [s for s in self.profile.find("copy", memory="pageable", direction="h2d") if not self.on_cpu]
        self.note("cpu.page_lock_bytes_per_s", locks)
        self.note("cpu.pageable_bytes_per_s", pageable[-1:])
        return {
            "name": f"{self.machine['cpu']}, {cores} cores",
            "num_domains": min(max(len(self.machine["numa_domains"]), 1), cores),
            "cores": cores,
            "memory_bytes": max(float(self.machine["memory_bytes"]), self.usable_host_bytes),
            "usable_memory_bytes": self.usable_host_bytes,
            "memory_bandwidth_bytes_per_s": max(self.traffic(large, steps)),
            "adam_parameters_per_s": rate,
            "undo_slowdown": self.undo_slowdown(large, without_undo),
            "adam_s_per_op": fixed_s,
            "page_lock_bytes_per_s": _rate(locks[0]) if locks else None,
            "page_locked": self.on_cpu or bool(locks) or not pageable,
            "pageable_bytes_per_s": _rate(pageable[-1]) if pageable else None,
            "process_bytes": self.machine.get("process_bytes"),
        }

    def undo_slowdown(self, with_undo: Sample, without: Sequence[Sample]) -> float:
        """No less than 1, and no more than a log can add to what a step moves; a busy machine shows anything."""
        self.note("cpu.undo_slowdown", without)
        ratios = [median(with_undo.seconds) / median(sample.seconds) for sample in without]
        return min(max(1.0, *ratios), _MOST_OF_A_LOG) if ratios else 1.0

    def traffic(self, alone: Sample, steps: Sequence[Sample]) -> list[float]:
        """Bytes per second that the host's memory was seen to move: triad, the optimizer, and that beside copies."""
        per_parameter = 24 + 2 * {"fp32": 4, "bf16": 2, "fp16": 2}[alone.about["dtype"]]
        found = [_rate(sample) for sample in self.profile.find("triad")]
        steps_alone = [alone, *(step for step in steps if step.about.get("undo") is False)]
        found += [per_parameter * step.about["parameters"] / median(step.seconds) for step in steps_alone]
        copies = self.profile.find("copy", beside_adam=True)
        for step in steps:
            if step.about.get("beside_copies") and copies:
                copied = 2 * copies[0].about["devices"] * _rate(copies[0])
                found.append(per_parameter * step.about["parameters"] / median(step.seconds) + copied)
        return found

    # ------------------------------------------------------------------ links

    def cpu_links(self) -> list[Link]:
        largest = self.profile.find("copy")[-1:]  # what fits into the caches is not what a step copies
        if not largest:
            raise SpipeError("the profile has no copies; profile again")
        self.note("links[0].bandwidth_bytes_per_s", largest)
        handover_s = median(self.profile.find("issue")[0].seconds)
        return [Link(a="gpu*", b="memory", bandwidth_bytes_per_s=_rate(largest[0]), latency_s=handover_s)]

    def gpu_links(self) -> list[Link]:
        """GPUs to memory, with a root complex between where copies of all at once share it, and between GPUs."""
        alone = self.profile.find("copy", memory="page-locked", devices=1)
        alone = [s for s in alone if not s.about.get("beside_adam")]
        one_way = [_line([s for s in alone if s.about["direction"] == way]) for way in ("h2d", "d2h")]
        bandwidth = sum(width for width, _ in one_way) / 2
        latency_s = sum(fixed for _, fixed in one_way) / 2
        both = [s for s in alone if s.about["direction"] == "both"]
        together = min(max(2 * _rate(both[-1]), bandwidth), 2 * bandwidth) if both else None
        number = len(self.machine["gpus"])
        shared = self.all_at_once(number)
        peer = self.profile.find("peer copy")
        peer_bandwidth, peer_latency = _line([s for s in peer if s.about["target"] == 1]) if peer else (0.0, 0.0)
        nvlink = peer_bandwidth > _NVLINK * bandwidth
        by_pcie = bool(self.machine.get("peer_access")) and not nvlink
        narrow = number > 1 and shared < _SHARED * number * bandwidth
        first: dict[str, Any] = {
            "a": "gpu*",
            "bandwidth_bytes_per_s": bandwidth,
            "both_directions_bytes_per_s": together,
        }
        self.note("links[0].bandwidth_bytes_per_s", alone[-1:])
        if narrow or by_pcie:
            width = shared if narrow else number * bandwidth
            links = [
                Link(**first, b="root0", latency_s=latency_s),
                Link(a="root0", b="memory", bandwidth_bytes_per_s=max(width, bandwidth)),
            ]
        else:
            links = [Link(**first, b="memory", latency_s=latency_s)]
        if nvlink:
            self.note(f"links[{len(links)}].bandwidth_bytes_per_s", peer[-1:])
            links.append(
                Link(a="gpu*", b="nvswitch0", bandwidth_bytes_per_s=peer_bandwidth, latency_s=peer_latency / 2)
            )
        return links

    def all_at_once(self, number: int) -> float:
        """Bytes per second of all GPUs together, in the slower direction."""
        found = [
            s for s in self.profile.find("copy", memory="page-locked", devices=number) if "beside_adam" not in s.about
        ]
        rates = [number * _rate(s) for s in found if s.about["direction"] != "both"]
        return min(rates, default=math.inf)

    def accelerator_memory(self) -> float:
        """Bytes per second of an accelerator's own memory; a core reads and writes what it copies."""
        samples = self.profile.find("copy")[-1:] if self.on_cpu else self.profile.find("device copy")
        if not samples:
            raise SpipeError("the profile has no copies inside the accelerator's memory; profile again")
        self.note("accelerator.memory_bandwidth_bytes_per_s", samples)
        return 2 * _rate(samples[0])


def with_efficiency(spec: HardwareSpec, layers: Sequence[Sample]) -> HardwareSpec:
    """The efficiency curve that explains the measured blocks, for shapes that were not measured."""
    rows, values = [], []
    for sample in layers:
        about = sample.about
        if about["layer_kind"] != "block":
            continue
        model, x = _model(about), 1 / (about["microbatch_size"] * about["sequence"]) + 1 / about["hidden_size"]
        whole, half = (_roofline_s(spec, model, about, peak) for peak in (1.0, 2.0))
        operations_s, moved_s = 2 * (whole - half), 2 * half - whole
        seconds = median(sample.seconds)
        if seconds > moved_s:
            rows.append([operations_s, operations_s * x])
            values.append(seconds - moved_s)
    if not rows:
        return spec
    guess = _TOKENS[spec.device]
    # The curve is given by the prior as far as the shapes do not tell it.
    inverse, slope = nonnegative_fit(rows, values, [Prior([guess, -1.0], 0.0, 0.5 * guess)], noise=0.02)
    efficiency = 1.0 if inverse <= 0 else min(1.0, 1 / inverse)
    accelerator = spec.accelerator.replace(
        max_efficiency=efficiency, half_efficiency_tokens=min(float(slope) * efficiency, 1e6)
    )
    fitted = {f"accelerator.{name}": "fitted" for name in ("max_efficiency", "half_efficiency_tokens")}
    return spec.replace(accelerator=accelerator, provenance={**spec.provenance, **fitted})


def _roofline_s(spec: HardwareSpec, model: ModelSpec, about: dict[str, Any], peak: float) -> float:
    accelerator = spec.accelerator
    faster = accelerator.replace(peak_flops={name: peak * flops for name, flops in accelerator.peak_flops.items()})
    costs = CostModel(
        model, spec.replace(accelerator=faster), about["dtype"], about["sequence"], about["microbatch_size"],
        compute_threads=accelerator.compute_threads,
    )  # fmt: skip
    kind: LayerKind = about["layer_kind"]
    name: PassName = about["pass_name"]
    return costs.layer_s(kind, name)


def _model(about: dict[str, Any]) -> ModelSpec:
    """A model with such a block."""
    return ModelSpec(
        name="profiled", num_layers=1, hidden_size=about["hidden_size"], ffn_size=about["ffn_size"],
        num_heads=about["num_heads"], num_kv_heads=about["num_kv_heads"], vocab_size=64,
        head_dim=about.get("head_dim", 0),
    )  # fmt: skip


def _entry(sample: Sample) -> MeasuredLayer:
    fields = {name: value for name, value in sample.about.items() if name in MeasuredLayer.model_fields}
    samples = Samples.of(sample.seconds)
    return MeasuredLayer(
        **fields, seconds=samples.median, spread_s=samples.spread, num_samples=samples.count, source="profile"
    )


def _relative_error(sample: Sample) -> float:
    samples = Samples.of(sample.seconds)
    return standard_error(samples.spread, samples.count) / samples.median if samples.median > 0 else 0.0


def _rate(sample: Sample) -> float:
    """Bytes per second, of one GPU and one direction."""
    return float(sample.about["bytes"]) / median(sample.seconds)


def _line(samples: Sequence[Sample]) -> tuple[float, float]:
    """(bytes per second, fixed seconds) of copies of several sizes."""
    if not samples:
        raise SpipeError("the profile has no copies; profile again")
    slope, fixed = nonnegative_fit([[s.about["bytes"], 1.0] for s in samples], [median(s.seconds) for s in samples])
    return (1 / slope if slope > 0 else _rate(samples[-1])), float(fixed)
