# %% [markdown]
# # Published runs: validation and ablation
#
# The SPipe paper (PACT 2025) was published with a table of measured steps on up to 32 V100 and 8 RTX 3090 cards.
# Nobody of this project made those runs, so they are a test of the simulator. `docs/validation.md` has all rows and
# says what the constants were fitted to; this page predicts the rows of one and two hosts again.

# %%
# %matplotlib inline
import re
from pathlib import Path

from IPython.display import display

from spipe import plots
from spipe.hardware import load_hardware
from spipe.model import load_model
from spipe.plan import make_plan
from spipe.sim import simulate
from spipe.sim.published import FITTED_TO, Run, cluster_hardware
from spipe.sim.validation import errors, predict

page = next(folder / "docs" / "validation.md" for folder in (Path(), Path("..")) if (folder / "docs").is_dir())
table = page.read_text().split("## All rows", 1)[1]
cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", table, re.MULTILINE)]
names, rows = cells[0], cells[2:]
published = [dict(zip(names, row, strict=True)) for row in rows]
print(len(published), "published runs, of", sorted({row["system"] for row in published}))

# %%
runs = [
    Run(
        line=number,
        figure=row["figure"],
        system=row["system"],
        cluster="spipe-" + row["cluster"],
        model_size=int(row["size"].removesuffix("B")),
        microbatch_size=int(row["microbatch"]),
        global_batch=int(row["batch"]),
        num_hosts=int(row["hosts"]),
        sequence=int(row["tokens"]),
        tflops=None,
        measured_s=float(row["measured s"]),
        gpu_measured_s=None,
    )
    for number, row in enumerate(published)
    if re.fullmatch(r"[\d.]+", row["measured s"]) and int(row["hosts"]) <= 2
]
predictions = []
for run in runs:
    hardware = cluster_hardware(run.cluster)
    used_for = "fit" if run in FITTED_TO[hardware.name] else "judge"
    predictions.append(predict(run, hardware, used_for))
display(plots.predicted_against_measured([row.to_json() for row in predictions]))

# %% [markdown]
# Filled marks are rows that no constant was fitted to. DeepSpeed (ZeRO-3 with CPU offload) is another kind of system,
# there for comparison: its collectives are assumed to reach half of a link's bandwidth, and no constant was fitted to
# its rows.

# %%
for system in ("SPipe", "Mobius", "Megatron", "DeepSpeed"):
    judged = [row for row in predictions if row.run.system == system and row.used_for == "judge"]
    found = errors(row.error for row in judged)
    print(f"{system:10} {found['num_rows']:3} rows, error {found['mean_abs_error']:.1%} on average")
    if system != "DeepSpeed":
        assert found["mean_abs_error"] < 0.08

# %% [markdown]
# ## What the gain is made of
#
# The paper takes SPipe apart for a model of 19 B parameters on one V100 host: from Mobius, step by step to SPipe. The
# same steps, simulated and as published:

# %%
SYNCHRONOUS = {"optimizer": "sync", "stage_inputs": "sync", "recompute": "late"}
STEPS = [
    ("Mobius", "mobius", 2, {}, 16.023),
    ("backward on other ranks (2:2)", "spipe", 2, SYNCHRONOUS, 16.309),
    ("finer backward stages (2:6)", "spipe", 6, SYNCHRONOUS, 15.582),
    ("asynchronous stage inputs", "spipe", 6, {"optimizer": "sync"}, 15.275),
    ("asynchronous optimizer", "spipe", 6, {}, 12.720),
]
simulated = []
for name, schedule, backward, options, _ in STEPS:
    plan = make_plan(
        load_model("19b"),
        load_hardware("v100x4"),
        schedule=schedule,
        forward_stages=2,
        backward_stages=backward,
        global_batch=8,
        microbatch_size=2,
        sequence=1024,
        published=True,
        precision="fp16",
        layer_costs=[0.0, *[1.0] * 48, 0.0],
        options={"optimizer_workers": 2, **options},
    )
    simulated.append((name, simulate(plan, num_steps=1).makespan_s))
for (name, predicted_s), (*_, measured_s) in zip(simulated, STEPS, strict=True):
    print(f"{name:30} measured {1e3 * measured_s:6.0f} ms, predicted {1e3 * predicted_s:6.0f} ms")
display(plots.ablation(simulated, "simulated"))
display(plots.ablation([(name, seconds) for name, *_, seconds in STEPS], "as published"))

# %% [markdown]
# Finer stages alone buy little; the optimizer that works beside the backward pass buys most.
