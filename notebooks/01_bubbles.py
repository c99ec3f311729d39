# %% [markdown]
# # Where the time goes: four schedules side by side
#
# A pipeline keeps its ranks waiting: at the start until work arrives, at the end until the others are done, and in
# between wherever an operation is late. `spipe` gives every idle interval of every rank exactly one cause, so that
# schedules can be compared by *why* they wait, not only by how long.
#
# This page compares four generators twice: on an ideal machine, where their step times are known formulas, and on a
# model of a host with four V100 cards, where weights, gradients and the optimizer share slow links and CPU memory.
# Everything here is simulated; it needs no GPU.

# %%
import matplotlib.pyplot as plt

from spipe.hardware import load_hardware
from spipe.metrics import CAUSES
from spipe.model import load_model
from spipe.ops import COMPUTE, Kind
from spipe.plan import make_plan
from spipe.plots.style import CAUSE_COLOURS, GROUP_COLOURS
from spipe.sim import Simulation, simulate
from spipe.timed import GROUP_OF

MODEL = load_model("10b")
# name on the page -> (schedule, forward stages per rank, backward stages per rank)
SYSTEMS = {
    "GPipe": ("gpipe", 1, 1),
    "1F1B": ("1f1b", 2, 2),
    "Mobius": ("mobius", 2, 2),
    "SPipe 2:2": ("spipe", 2, 2),
    "SPipe 2:6": ("spipe", 2, 6),
}
NUM_RANKS, NUM_MICROBATCHES = 4, 8


def simulated(hardware_name: str, *, equal_blocks: bool, published: bool = True) -> dict[str, Simulation]:
    """Every system on one hardware: 4 ranks, 8 microbatches of 2 sequences of 1024 tokens."""
    costs = [0.0, *[1.0] * MODEL.num_layers, 0.0] if equal_blocks else None
    return {
        name: simulate(
            make_plan(
                MODEL,
                load_hardware(hardware_name),
                schedule=schedule,
                num_ranks=NUM_RANKS,
                forward_stages=forward,
                backward_stages=backward,
                global_batch=2 * NUM_MICROBATCHES,
                microbatch_size=2,
                sequence=1024,
                precision="fp16",
                published=published,
                layer_costs=costs,
            )
        )
        for name, (schedule, forward, backward) in SYSTEMS.items()
    }


# %% [markdown]
# ## An ideal machine
#
# Every block takes one unit of time forward, one to recompute and two backward; nothing else takes any. With
# *F* forward stages a rank, *N* ranks, *M* microbatches, and *tf* the forward time of one stage, the published formulas
# for the step are
#
# | schedule | step, in *tf* | *N* = 4, *F* = 2, *M* = 8 |
# |---|---|---|
# | Mobius, interleaved 1F1B | 4(*FM* + *N* − 1) | 76 |
# | SPipe with *B* = *F*, early recompute | 4*FM* + 2(*N* − 1) | 70 |
# | SPipe with *B* = 3*F* | 4*FM* + *N* − 1 | 67 |
#
# GPipe has one stage a rank: 4(*M* + *N* − 1) of its stages, which are twice as long, so 88. The simulator has to
# give these numbers exactly.

# %%
ideal = simulated("ideal", equal_blocks=True)
stage_s = MODEL.num_layers / (2 * NUM_RANKS) * 1e-3
for name, simulation in ideal.items():
    print(f"{name:10} {simulation.makespan_s / stage_s:6.1f} tf")

expected = {"GPipe": 88, "1F1B": 76, "Mobius": 76, "SPipe 2:2": 70, "SPipe 2:6": 67}
for name, units in expected.items():
    assert abs(ideal[name].makespan_s / stage_s - units) < 1e-6, name

# %% [markdown]
# The same steps as a picture, one row per rank. Forward and backward of a layer run on the same rank in the first
# three; SPipe turns the ranks around for the backward pass, so that the rank which ends its forward pass first also
# begins the backward pass first. With finer backward stages (2:6), a backward stage takes as long as a forward stage,
# and the whole step is one ring without a gap but the ramps.

# %%
COLOURS = {kind: GROUP_COLOURS[GROUP_OF[kind]] for kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD)}


def draw(axis: plt.Axes, simulation: Simulation) -> None:
    """The compute lanes of the last step."""
    program, trace = simulation.program, simulation.trace
    begin, end = simulation.bubbles.window_s
    for row, i in enumerate(trace.op):
        kind = Kind(program.kind[i])
        if kind in COMPUTE and trace.end_s[row] > begin:
            width = trace.end_s[row] - trace.start_s[row]
            axis.barh(
                program.rank[i], width, left=trace.start_s[row] - begin, color=COLOURS[kind], edgecolor="white", lw=0.2
            )
    axis.axvline(end - begin, color="black", lw=0.8)
    axis.set_yticks(range(NUM_RANKS), [f"rank {r}" for r in range(NUM_RANKS)])
    axis.invert_yaxis()


def gallery(simulations: dict[str, Simulation], title: str) -> None:
    """All systems on one time axis."""
    figure, axes = plt.subplots(len(simulations), 1, figsize=(10, 7), sharex=True, layout="constrained")
    for axis, (name, simulation) in zip(axes, simulations.items(), strict=True):
        draw(axis, simulation)
        axis.set_title(f"{name}: {simulation.step_s:.3g} s", loc="left", fontsize=10)
    axes[-1].set_xlim(0, 1.02 * max(simulation.step_s for simulation in simulations.values()))
    axes[-1].set_xlabel("seconds")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(handles, [kind.name.lower() for kind in COLOURS], loc="outside lower center", ncols=3)
    figure.suptitle(title)
    plt.show()


gallery(ideal, "An ideal machine")

# %% [markdown]
# ## Idle time by cause
#
# Fill is the wait for the first work, drain the wait for the others at the end, upstream the wait for an activation or
# a gradient that another rank has yet to compute. The causes of a rank sum to its idle time; a bar is the mean over
# the ranks.


# %%
def breakdown(simulations: dict[str, Simulation], title: str) -> None:
    """Idle time of a step as a stacked bar per system, averaged over the ranks."""
    _figure, axis = plt.subplots(figsize=(10, 4), layout="constrained")
    left = [0.0] * len(simulations)
    for cause in CAUSES:
        widths = [simulation.bubbles.total()[cause] / NUM_RANKS for simulation in simulations.values()]
        if any(widths):
            axis.barh(list(simulations), widths, left=left, color=CAUSE_COLOURS[cause], label=cause)
            left = [a + b for a, b in zip(left, widths, strict=True)]
    for position, (simulation, idle_s) in enumerate(zip(simulations.values(), left, strict=True)):
        axis.text(idle_s, position, f"  {idle_s / simulation.step_s:.0%} of the step", va="center", fontsize=9)
    axis.set_xlim(0, 1.2 * max(left))
    axis.invert_yaxis()
    axis.set_xlabel("idle seconds of a rank")
    axis.set_title(title, loc="left")
    axis.legend(ncols=4, fontsize=8, loc="lower right")
    plt.show()


breakdown(ideal, "An ideal machine")
for simulation in ideal.values():
    metrics = simulation.bubbles
    assert abs(sum(metrics.total().values()) - metrics.idle_s) <= 1e-9 * metrics.idle_s

# %% [markdown]
# ## A host with four V100 cards
#
# Now the 10 B model with its head and embedding, PCIe links, and an optimizer on the CPU. The picture changes: the
# synchronous optimizer of the first three costs more than all pipeline bubbles together. SPipe starts the optimizer
# while the backward pass goes on, and most of its gain comes from there.
#
# A step is counted from the moment all ranks agree on the gradients to the same moment one step later, so the optimizer
# work of the step before stands at the left of each picture.

# %%
v100 = simulated("v100x4", equal_blocks=False)
gallery(v100, "Four V100 cards, as published")
breakdown(v100, "Four V100 cards, as published")

# %% [markdown]
# What is left of SPipe's wait is the optimizer's tail: with the published end-of-step barrier, nobody may start the
# next step before the last parameter has been updated. Our defaults have no barrier. The weights of a layer are
# fetched as soon as that layer has been updated, and the CPU updates the layers first that are needed first. The same
# defaults also skip forward work that the top backward stage recomputes anyway, for every schedule.

# %%
defaults = simulated("v100x4", equal_blocks=False, published=False)
breakdown(defaults, "Four V100 cards, with our defaults")
print(f"{'':10} {'published':>10} {'defaults':>10}")
for name in SYSTEMS:
    print(f"{name:10} {v100[name].step_s:8.2f} s {defaults[name].step_s:8.2f} s")

# %% [markdown]
# The seconds on V100 cards rest on assumed and published machine numbers, not on a calibration of one machine: read
# the shape of the bars, and calibrate (`spipe calibrate`) before trusting a second.
