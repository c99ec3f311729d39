# %% [markdown]
# # The closed loop: predict, run, calibrate, compare
#
# The same plan goes through both interpreters: the simulator says what it should take, the runtime trains it on two CPU
# ranks of this machine, and what the run measured corrects the description of the machine. Then another plan, which was
# not run before, is predicted first and run afterwards.

# %%
# %matplotlib inline
import tempfile
from pathlib import Path

from IPython.display import display

from spipe import plots, runtime
from spipe.demo import usable_cores
from spipe.hardware import load_hardware
from spipe.model import load_model
from spipe.plan import make_plan
from spipe.sim import calibrate, compare, simulate
from spipe.timed import TimedStep
from spipe.trace import Trace

folder = Path(tempfile.mkdtemp(prefix="spipe-notebook-"))
laptop = load_hardware("laptop").override({"cpu.cores": usable_cores()})


def plan(schedule, forward_stages, backward_stages, microbatches):
    """A small model on two ranks."""
    return make_plan(
        load_model("tiny"),
        laptop,
        schedule=schedule,
        num_ranks=2,
        forward_stages=forward_stages,
        backward_stages=backward_stages,
        microbatch_size=2,
        global_batch=2 * microbatches,
        sequence=128,
        precision="fp32",
    )


first = plan("spipe", 1, 2, 6)
before = simulate(first)
print(f"predicted from assumed numbers: {before.step_s:.3f} s a step")

# %% [markdown]
# ## Run it

# %%
runtime.run(first, steps=10, output=folder / "first")
timed = TimedStep.of_run(folder / "first")
display(plots.timeline(timed))

# %% [markdown]
# Every idle interval has one cause: the strip below each compute lane.
#
# ## Calibrate
#
# Times of layers, copies, messages and the optimizer are fitted to what was measured; the spread around each fit says
# how well one number describes it.

# %%
trace = Trace.load(folder / "first" / "trace.json")
result = calibrate([(first, trace)], laptop)
display(plots.residuals(result.to_json()))

# %%
held = compare(first, trace, result.hardware)
prediction = held.simulation
display(plots.op_errors(TimedStep.of("prediction", first, prediction.trace, prediction.last_step), timed))
step = held.step_time
print(f"predicted {step['predicted_s']:.3f} s, measured {step['measured_s']:.3f} s, {step['error']:+.1%}")

# %% [markdown]
# ## Predict another plan, then run it
#
# Another schedule, other stages, more microbatches.

# %%
other = plan("mobius", 2, 2, 8)
predicted = {"assumed": simulate(other).step_s, "calibrated": simulate(other, hardware=result.hardware).step_s}
measured = runtime.run(other, steps=10, output=folder / "other").median_step_s
for name, seconds in predicted.items():
    print(f"{name:10} {seconds:.3f} s, measured {measured:.3f} s, {seconds / measured - 1:+.1%}")

# %% [markdown]
# A prediction is for a machine that does nothing else. Where other programs run beside this notebook, steps take
# longer than any prediction; so nothing is asserted here about the error. `spipe demo` does the same in several
# rounds and with the medians of all.
