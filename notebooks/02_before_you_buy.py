# %% [markdown]
# # Before you buy
#
# How fast would a 7 B model train on eight RTX 4090 cards, and how fast on one H200? What does a billion tokens cost
# on each, and is more memory worth its price? `spipe` answers with the best plan that it finds for each machine, and
# a bound that says how much better any plan could be.
#
# Everything here is simulated, with a small fraction of a search's usual effort, so that the page takes seconds. **All
# prices are examples**: put in your own.

# %%
# %matplotlib inline
from IPython.display import display

from spipe import plots
from spipe.hardware import load_hardware
from spipe.model import load_model
from spipe.sim.whatif import UPGRADES, most_helpful, what_if

model = load_model("llama2-7b")
machines = {
    "8 x RTX 4090": load_hardware("rtx4090x8"),
    "1 x H200": load_hardware("h200x1"),
}
for name, hardware in machines.items():
    print(f"{name}: {hardware.price.purchase_dollars:,.0f} $ to buy, {hardware.price.rent_dollars_per_hour} $ an hour")

# %% [markdown]
# A machine is described in a file with units in its keys; any number in it can be changed on the spot. Here a host with
# half of the cards, at about half of the price.

# %%
machines["4 x RTX 4090"] = machines["8 x RTX 4090"].override(
    {"ranks_per_host": 4, "price.purchase_dollars": 18000, "price.rent_dollars_per_hour": 1.9}
)

rows = what_if(
    [model],
    list(machines.items()),
    upgrades=[upgrade for upgrade in UPGRADES if upgrade.name == "dram"],
    global_batch=64,
    sequence=2048,
    schedules=["spipe"],
    cuts="balanced",
    effort=0.03,
)
for row in rows:
    if not row["upgrade"]:
        words = row["plan"] if row["feasible"] else row["reason"]
        print(f"{row['offer']}: {words}")

# %%
display(plots.what_if(rows))

# %% [markdown]
# What an upgrade brings is searched again, too, because with more memory another plan may be the best one.

# %%
for (_, machine), words in most_helpful(rows).items():
    print(f"{machine}: {words}")

# %% [markdown]
# ## How far to trust it
#
# * Numbers of `h200x1` are measured; most of those of the RTX 4090 hosts are from data sheets. `spipe hardware NAME`
#   says which are which, and a run of a few minutes on a rented machine calibrates its description (see
#   `03_closed_loop`).
# * `gap` says how much faster a perfect plan could be at most:

# %%
for row in rows:
    if row["feasible"] and not row["upgrade"]:
        print(f"{row['offer']:30} at most {row['gap']:4.0%} faster; its limit: {row['limit']}")
assert all(row["gap"] >= 0 for row in rows if row["feasible"])
