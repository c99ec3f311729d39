# %% [markdown]
# # Your model: from a Hugging Face config to a plan and its cost
#
# `spipe` reads the `config.json` of LLaMA-like decoders (Llama, Mistral, Qwen2, Qwen3; dense). No weights are needed to
# plan. Here a model of 7 B parameters that exists nowhere but in this cell.

# %%
# %matplotlib inline
import json
import tempfile
from pathlib import Path

from IPython.display import display

from spipe import plots, show
from spipe.hardware import load_hardware
from spipe.memory import memory
from spipe.model import load_model
from spipe.sim import search
from spipe.timed import TimedStep

folder = Path(tempfile.mkdtemp()) / "my-7b"
folder.mkdir()
config = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 64000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
(folder / "config.json").write_text(json.dumps(config))
model = load_model(folder / "config.json")
print(f"{model.num_parameters() / 1e9:.2f} B parameters")
print(f"{16 * model.num_parameters() / 2**30:.0f} GiB of weights, gradients and optimizer state")

# %% [markdown]
# ## A plan
#
# Four RTX 3090 cards of 24 GiB cannot hold that state; most of it lives in CPU memory. The search looks for stages,
# cuts, microbatches and options, and says how far the result is from what no plan can beat.

# %%
found = search(
    model,
    load_hardware("rtx3090x4"),
    global_batch=32,
    sequence=2048,
    schedules=["spipe", "mobius"],
    cuts="balanced",
    effort=0.1,
)
print(show.plan_words(found.plan))
print(f"\n{found.simulation.step_s:.2f} s a step, {found.simulation.tokens_per_s:,.0f} tokens a second")
print(f"at most {found.gap:.0%} faster with any plan of this search; limit: {found.limit}")
display(
    plots.search_front({"candidates": found.candidates, "front": found.front, "lower_bound_s": found.lower_bound_s})
)

# %% [markdown]
# ## What a step looks like

# %%
simulation = found.simulation
timed = TimedStep.of("plan", found.plan, simulation.trace, simulation.last_step)
display(plots.timeline(timed, ranks=[0, 1]))

# %% [markdown]
# ## Whether it fits

# %%
display(plots.memory_over_time(timed))
report = memory(found.plan)
assert report.fits, report.problems

# %% [markdown]
# ## What it costs
#
# Price per hour over tokens per hour. The hour's price is an example.

# %%
dollars_per_hour = 1.2
dollars = dollars_per_hour * 1e9 / (simulation.tokens_per_s * 3600)
print(f"{dollars:,.0f} $ per billion tokens at {dollars_per_hour} $ an hour")

# %% [markdown]
# `found.plan.save("plan.json")` writes the plan; on the machine it was made for, `spipe run plan.json` trains it.
